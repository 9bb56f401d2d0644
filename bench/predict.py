"""Measure how far predicted step times are from measured ones, on emulated and on real work, against their budgets.

    python bench/predict.py [--ranks 2,4,8] [--families 1f1b,gpipe] [--skip emulated|real] [--output FILE.json]

A family such as 1f1b+recompute runs its forwards again before their backwards.

Emulated: stages sleep, uneven ones, on processes over gloo. Costs are fitted to a few recorded steps of a schedule and
predict the ten that follow. Real: the demo's model on two ranks with a thread each. Costs are fitted to steps of 1F1B,
and to others with its backwards in two parts; they predict other schedules and another split, whose steps are measured
in turn with those of 1F1B.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from emulated_layer import EmulatedLayer
from on_ranks import (
    NUM_WARM_UP_ROUNDS,
    REST_S,
    SEED,
    become_rank,
    comma_separated,
    give_rows,
    rows_of_ranks,
    write_rows,
)

from penstock.errors import ConfigError
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.partition.split import split_over
from penstock.pipeline import Pipeline
from penstock.schedules import FAMILIES, build
from penstock.simulation import LayerCosts, simulate
from penstock.simulation.costs.fit import costs_from_timelines
from penstock.train.profiling import with_parts

NUM_PROFILED, NUM_STEPS = 5, 10
"""Steps that costs are fitted to, as many as `penstock profile` records, and steps that are to be predicted."""
EMULATED_BUDGET, REAL_BUDGET = 0.02, 0.07
FORWARD_S, BACKWARD_S = 0.010, 0.020
"""Of a rank and microbatch; each stage takes its share of it, a fifth more or less."""
NUM_ROUNDS = 40
MICROBATCHES = 8
DEMO = DecoderConfig(vocabulary=256, width=160, layers=4, heads=4, key_value_heads=2, hidden=432, length=128)
"""As in examples/demo.toml."""
BATCH, LENGTH = 16, 128
UNEVEN_SPLIT = (2, 5)
"""Embedding and one block on rank 0; the other three, norm and head on rank 1."""


@dataclass(frozen=True)
class Row:
    """One prediction."""

    work: str
    ranks: int
    name: str
    measured_s: float
    """Median makespan over the steps."""
    spread: float
    """The middle half of the steps, as a share of the median."""
    predicted_s: float
    load: float
    """Processes that ran or wanted to, on the mean of the last minute."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def budget(self) -> float:
        return EMULATED_BUDGET if self.work == "emulated" else REAL_BUDGET


def row_of(work: str, name: str, measured: list[Timeline], predicted: Timeline) -> Row:
    seconds = [timeline.makespan_s for timeline in measured]
    middle = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    spread, load = (high - low) / middle, os.getloadavg()[0]
    return Row(work, predicted.num_ranks, name, middle, spread, predicted.makespan_s, load)


# ---- emulated work


def emulated(num_ranks: int, families: list[str]) -> Iterator[Row]:
    """Run every family on this rank; all ranks get the same rows."""
    for name in families:
        family, _, recompute = name.partition("+")
        slices = 2 if FAMILIES[family].takes_slices else 1
        try:
            schedule = build(
                family, ranks=num_ranks, microbatches=2 * num_ranks, slices=slices, recompute=bool(recompute)
            )
        except ConfigError:
            continue  # too few ranks for it
        with closing(emulated_pipeline(schedule)) as pipeline:
            batch = torch.zeros(schedule.num_microbatches, 4, 1)
            pipeline.step(batch, target=batch)
            timelines = [pipeline.profile(batch, target=batch) for _ in range(NUM_PROFILED + NUM_STEPS)]
        predicted = simulate(pipeline.program, costs_from_timelines(timelines[:NUM_PROFILED]))
        yield row_of("emulated", name, timelines[NUM_PROFILED:], predicted)


def emulated_pipeline(schedule: Schedule) -> Pipeline:
    """One sleeping layer per stage of a route, of uneven length."""
    chance = random.Random(SEED)
    num_layers = len(schedule.placement.routes[0])
    parts_per_rank = num_layers / schedule.num_ranks * schedule.num_slices
    factors = [chance.uniform(0.8, 1.2) / parts_per_rank for _ in range(num_layers)]
    layers = [EmulatedLayer(factor * FORWARD_S, factor * BACKWARD_S) for factor in factors]
    return Pipeline(layers, schedule, loss=lambda output, target: ((output - target) ** 2).mean())


# ---- real work


def real(num_ranks: int) -> Iterator[Row]:
    """Measure schedules in turn, so that a busy minute meets all of them; predict all from 1F1B's steps."""
    layers = decoder_layers(DEMO)
    pipelines = {name: Pipeline(layers, loss=cross_entropy_loss, **how) for name, how in real_settings(num_ranks)}
    profiled = pipelines["1f1b"]
    steps: dict[str, list[Timeline]] = {name: [] for name in pipelines}
    parts: list[Timeline] = []
    chance, turns = random.Random(SEED), list(pipelines)
    for number in range(NUM_WARM_UP_ROUNDS + NUM_ROUNDS):
        chance.shuffle(turns)
        for name in turns:
            steps[name].append(recorded(pipelines[name], number))
        parts.append(recorded(profiled, number, split_backwards=True))
    for timelines in (*steps.values(), parts):
        del timelines[:NUM_WARM_UP_ROUNDS]
    assert profiled.recording is not None
    costs = costs_from_timelines(steps["1f1b"], message_bytes=profiled.recording.message_bytes)
    costs = with_parts(costs, costs_from_timelines(parts))
    per_layer = LayerCosts.from_stages(costs, profiled.layers_of_stage, profiled.layer_weights)
    for name, pipeline in pipelines.items():
        of_stages = per_layer.of_stages(pipeline.layers_of_stage)
        yield row_of("real", name, steps[name], simulate(lower(pipeline.schedule), of_stages))
        pipeline.close()


def recorded(pipeline: Pipeline, number: int, *, split_backwards: bool = False) -> Timeline:
    """Run one step on a batch of its number; no weights change."""
    batch = torch.randint(DEMO.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    tokens, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    time.sleep(REST_S)
    timeline = pipeline.profile(tokens, target=target, split_backwards=split_backwards)
    for _, parameter in pipeline.named_parameters():
        parameter.grad = None
    return timeline


def real_settings(num_ranks: int) -> list[tuple[str, dict[str, object]]]:
    """What is measured: names, and arguments of the pipelines."""
    names = {"1f1b": 1, "gpipe": 1, "interleaved-1f1b": 2, "zb-h1": 1}
    plain = [
        (name, {"schedule": build(name, ranks=num_ranks, microbatches=MICROBATCHES, stages_per_rank=stages)})
        for name, stages in names.items()
    ]
    uneven = build("1f1b", ranks=num_ranks, microbatches=MICROBATCHES)
    split_over(uneven.placement, sum(UNEVEN_SPLIT), split=UNEVEN_SPLIT)
    return [*plain, (f"1f1b, split {UNEVEN_SPLIT}", {"schedule": uneven, "split": UNEVEN_SPLIT})]


# ---- the command


def shown(row: Row) -> str:
    verdict = "ok" if abs(row.error) <= row.budget else "TOO FAR"
    measured = f"{1e3 * row.measured_s:8.1f} ms ({100 * row.spread:4.1f} %)"
    predicted = f"{1e3 * row.predicted_s:8.1f} ms  {100 * row.error:+6.2f} %"
    budget = f"{100 * row.budget:5.0f} %"
    return f"{row.work:<9} {row.ranks:>5}  {row.name:<24} {measured}  {predicted} {budget} {row.load:5.1f}  {verdict}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trained = [name for name in FAMILIES if name != "forward-only"]
    parser.add_argument("--ranks", type=comma_separated, default=["2", "4", "8"], help="of emulated work")
    parser.add_argument("--families", type=comma_separated, default=trained, help="of emulated work")
    parser.add_argument("--skip", choices=("emulated", "real"), help="leave out one sort of work")
    parser.add_argument("--output", help="a JSON file for the rows")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Print one line per prediction; return 1 when one is further off than its budget."""
    arguments = read_arguments()
    if arguments.rows:
        become_rank()
        num_ranks = dist.get_world_size()
        rows_here = emulated(num_ranks, arguments.families) if arguments.work == "emulated" else real(num_ranks)
        give_rows(arguments.rows, map(asdict, rows_here))
        return 0
    print("work      ranks  schedule                    measured (middle half)  predicted      error  budget  load")
    rows: list[Row] = []
    wanted = [("emulated", int(count)) for count in arguments.ranks] + [("real", 2)]
    for work, num_ranks in wanted:
        if work != arguments.skip:
            words = ["--work", work, "--families", ",".join(arguments.families)]
            found = [Row(**row) for row in rows_of_ranks(__file__, words, num_ranks=num_ranks)]
            print("\n".join(map(shown, found)), flush=True)
            rows += found
    for work in dict.fromkeys(row.work for row in rows):
        errors = [abs(row.error) for row in rows if row.work == work]
        within = sum(row.work == work and abs(row.error) <= row.budget for row in rows)
        print(f"{work}: {within} of {len(errors)} within budget; median error {100 * statistics.median(errors):.2f} %")
    write_rows(arguments.output, [asdict(row) | {"error": row.error} for row in rows])
    return int(any(abs(row.error) > row.budget for row in rows))


if __name__ == "__main__":
    sys.exit(main())
