"""Measure steps of emulated work against their simulated makespans, and against torch's on the same order.

    python bench/devices.py [--ranks 4,8] [--microbatches 8,16] [--families 1f1b,zbv] [--output FILE.json]
    python bench/devices.py --work branch,function --ranks 4 --families zb-h1,zbv,interleaved-zb,dualpipe-v

F, and I and W of a split backward, take each rank 10 ms per microbatch, in which it sleeps: so there is
room for every rank, whatever machine this is. Ranks are processes over gloo. A sleep overshoots, so a makespan is
simulated with costs that are fitted to a few recorded steps of the same run; beside it stand the makespans of the
computations alone, as long as they took and as they were planned. Penstock, recorded steps and torch take turns.
`--work` says where weight work stands: behind a product, in a branch that is added, or in a function of both.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from emulated_work import WORK
from in_torch import COUNTERPARTS, torch_step
from on_ranks import (
    Table,
    become_rank,
    bench_parser,
    comma_separated,
    give_rows,
    in_turn,
    paired_ratio,
    rows_of_ranks,
    spread_of,
    with_spread,
    write_rows,
)
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.pipeline import Pipeline
from penstock.schedules import FAMILIES, build
from penstock.simulation import Costs, simulate
from penstock.simulation.costs.fit import costs_from_timelines

PART_S = 0.010
"""What F, I and W each take of a rank and microbatch; each of its stages takes its share."""
BUDGETS = {"product": 1.03, "branch": 1.05, "function": 1.05}
"""Measured over simulated, by where weight work stands."""
NOISE = 0.01
"""Two measurements that are this close are one."""
RECORDED_EVERY = 3
"""Rounds."""
COLUMNS = {"work": 8, "ranks": 5, "m": 3, "family": 17, "planned": 7, "computed": 8, "simulated": 9}
COLUMNS |= {"measured": 16, "ratio": 6, "torch": 16, "over torch": 10, "": 6}


@dataclass(frozen=True)
class Row:
    """One family on so many ranks."""

    work: str
    ranks: int
    microbatches: int
    family: str
    measured_s: float
    """Median over the steps, as all times here."""
    spread: float
    """The middle half of the steps, as a share of the median."""
    ideal_s: float
    """Simulated, with computations as long as they were to take, and nothing else."""
    computed_s: float
    """Simulated, with computations as long as they took, and nothing else."""
    simulated_s: float
    """Simulated from all that was measured, also of messages and of the host's time for an instruction."""
    torch_s: float | None
    torch_spread: float | None
    over_torch: float | None
    """The median of the rounds."""

    @property
    def ratio(self) -> float:
        return self.measured_s / self.simulated_s

    @property
    def is_within(self) -> bool:
        return self.ratio <= BUDGETS[self.work] and (self.over_torch or 0.0) <= 1 + NOISE


def measure(works: list[str], families: list[str], num_microbatches: int, num_rounds: int) -> Iterator[dict[str, Any]]:
    """Measure every family on this rank; all ranks get the same rows."""
    for work, family in product(works, families):
        counterpart = COUNTERPARTS.get(family)
        try:
            schedule = build(
                family,
                ranks=dist.get_world_size(),
                microbatches=num_microbatches,
                slices=2 if FAMILIES[family].takes_slices else 1,
                **(counterpart.options if counterpart else {}),
            )
        except ConfigError:
            continue  # too few ranks or microbatches for it
        yield asdict(measure_one(work, family, schedule, num_rounds))


def measure_one(work: str, family: str, schedule: Schedule, num_rounds: int) -> Row:
    batch = torch.zeros(schedule.num_microbatches, 4, 1)
    timelines: list[Timeline] = []
    with closing(Pipeline(emulated_layers(work, schedule), schedule, loss=square_loss)) as pipeline:
        turns = {
            "penstock": lambda: pipeline.step(batch, target=batch),
            "recorded": sometimes(lambda: timelines.append(pipeline.profile(batch, target=batch))),
        }
        if family in COUNTERPARTS:
            step = torch_step(family, schedule, emulated_layers(work, schedule), pipeline.layers_of_stage, square_loss)
            turns["torch"] = lambda: step(batch, batch)
        seconds = in_turn(turns, num_rounds)
        program = pipeline.program
    costs = costs_from_timelines(timelines[1:])
    theirs = seconds.get("torch")
    return Row(
        work,
        schedule.num_ranks,
        schedule.num_microbatches,
        family,
        statistics.median(seconds["penstock"]),
        spread_of(seconds["penstock"]),
        simulate(program, ideal_costs(schedule)).makespan_s,
        simulate(program, computations_of(costs)).makespan_s,
        simulate(program, costs).makespan_s,
        statistics.median(theirs) if theirs else None,
        spread_of(theirs) if theirs else None,
        paired_ratio(seconds["penstock"], theirs) if theirs else None,
    )


def sometimes(call: Callable[[], object]) -> Callable[[], None]:
    """Call in some rounds only."""
    rounds = iter(range(sys.maxsize))

    def turn() -> None:
        if next(rounds) % RECORDED_EVERY == 0:
            call()

    return turn


def emulated_layers(work: str, schedule: Schedule) -> list[nn.Module]:
    """One layer per stage of a route."""
    num_layers = len(schedule.placement.routes[0])
    part_s = PART_S * schedule.num_ranks / num_layers / schedule.num_slices
    return [WORK[work](part_s) for _ in range(num_layers)]


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def computations_of(costs: Costs) -> Costs:
    """Leave nothing but the seconds of computations."""
    return replace(costs, latency_s=0.0, bandwidth_bytes_per_s=inf, channels=(), launch_s=0.0)


def ideal_costs(schedule: Schedule) -> Costs:
    part_s = PART_S * schedule.num_ranks / len(schedule.placement.routes[0]) / schedule.num_slices
    return Costs.uniform(forward=part_s, backward_input=part_s, backward_weight=part_s)


def cells_of(row: Row) -> list[str]:
    simulated = [ms(each) for each in (row.ideal_s, row.computed_s, row.simulated_s)]
    measured = [with_spread(ms(row.measured_s), row.spread), f"{row.ratio:.3f}"]
    theirs = ["", ""]
    if row.torch_s is not None and row.torch_spread is not None:
        theirs = [with_spread(ms(row.torch_s), row.torch_spread), f"{row.over_torch:.3f}"]
    verdict = "" if row.is_within else "MISSED"
    return [row.work, str(row.ranks), str(row.microbatches), row.family, *simulated, *measured, *theirs, verdict]


def print_summary(rows: Sequence[Row]) -> None:
    """Print one line per family: measured, over the makespan simulated, and over torch."""
    shapes = list(dict.fromkeys((row.ranks, row.microbatches) for row in rows))
    found = {(row.work, row.family, row.ranks, row.microbatches): row for row in rows}
    print()
    table = Table({"work": 8, "family": 17} | {f"p = {ranks}, m = {count}": 26 for ranks, count in shapes})
    for name in dict.fromkeys((row.work, row.family) for row in rows):
        table.print([*name, *(in_short(found.get((*name, *shape))) for shape in shapes)])


def in_short(row: Row | None) -> str:
    if row is None:
        return ""
    over_torch = "" if row.over_torch is None else f"; torch {row.over_torch:.3f}"
    return f"{ms(row.measured_s)}, {row.ratio:.3f}{over_torch}"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def main() -> int:
    """Print one line per family; return 1 when one is too far above its makespan, or above torch."""
    trained = [name for name in FAMILIES if name != "forward-only"]
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=comma_separated, default=["4", "8"])
    parser.add_argument("--microbatches", type=comma_separated, default=["8", "16"])
    parser.add_argument("--families", type=comma_separated, default=trained)
    parser.add_argument("--work", type=comma_separated, default=["product"], help=f"of {', '.join(WORK)}")
    arguments = parser.parse_args()
    if arguments.rows:
        become_rank()
        give_rows(
            arguments.rows,
            measure(arguments.work, arguments.families, int(arguments.microbatches[0]), arguments.rounds),
        )
        return 0
    print(f"torch {torch.__version__}; ms, medians of {arguments.rounds} steps (and their middle half)\n")
    table = Table(COLUMNS)
    rows: list[Row] = []
    for num_ranks in map(int, arguments.ranks):
        for count in arguments.microbatches:
            words = ["--microbatches", count, "--families", ",".join(arguments.families)]
            words += ["--work", ",".join(arguments.work), "--rounds", str(arguments.rounds)]
            found = [Row(**row) for row in rows_of_ranks(__file__, words, num_ranks=num_ranks)]
            for row in found:
                table.print(cells_of(row))
            rows += found
    print_summary(rows)
    write_rows(arguments.output, [asdict(row) | {"ratio": row.ratio} for row in rows])
    missed = [row for row in rows if not row.is_within]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} within their budgets over their makespan, and not above torch")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
