"""Measure what the search finds, against searches of others, families and optima, and how many candidates it times.

    python bench/search.py [--parts found,published,uneven,profiles,random,speed,large] [--seconds S] [--output FILE]

found      388 searches by the zero-bubble schedulers (sail-sg): none of them may have found a shorter span
published  the search cells of arXiv 2401.10241, tables 5 and 8, and its curve over memory: bubble rates at or below
           them; on a line at the memory of 1F1B, gap 0
uneven     a measured profile with a heavy first and last stage, at three limits: the known span, and gap 0
profiles   12 measured models of uneven layers, without a limit: never above 1F1B with even layers; beside OctoPipe,
           which moves layers between stages as well, and over the work of all ranks
random     200 random uneven cost sets, limits and links: at least as good as every family that fits
speed      candidates a second on one core, with times and bytes: 8 ranks, 64 microbatches, at least 10,000
large      64 ranks, 256 microbatches, 60 seconds: no family that fits is better

Exit status 1 where a budget is missed.
"""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from on_ranks import Table, bench_parser, comma_separated, write_rows

from penstock import Costs, LayerCosts, Placement, search
from penstock.errors import ConfigError, ScheduleError
from penstock.ir.schedule import Schedule
from penstock.partition.split import split_over
from penstock.planning import plan, stage_costs
from penstock.schedules import FAMILIES, build
from penstock.searching.moves import Moves
from penstock.searching.problem import Problem, every_action
from penstock.searching.question import place
from penstock.searching.sequences import run, sequence_of

DATA = Path(__file__).parents[1] / "tests" / "data"
UNITS = 10
"""Of memory in the data, which have halves."""
NUM_RANDOM, CANDIDATES_PER_S, ROUNDING = 200, 10_000, 1e-9

Row = dict[str, Any]


def found(arguments: Namespace) -> tuple[list[Row], bool]:
    rows = []
    for case in rows_of("searched_zero_bubble.json"):
        kind, ranks, microbatches, *_ = case["name"].split("/")
        of_forward, of_input, _ = case["memory"]
        result = search(
            costs_of(case["seconds"], round(of_forward * UNITS), round((of_forward + of_input) * UNITS)),
            int(ranks[1:]),
            int(microbatches[1:]),
            memory_limit=None if case["limit"] is None else round(case["limit"] * UNITS),
            placement="line" if kind == "zb" else "v",
            objective="span",
            seconds=arguments.seconds,
        )
        rows.append(
            {
                "name": case["name"],
                "theirs": case["span"],
                "ours": result.span_s,
                "gap": result.gap,
                "method": result.method,
                "is_uneven": len(set(case["seconds"][:3])) > 1,
            }
        )
    over = [row["ours"] / row["theirs"] - 1 for row in rows]
    worse = [row["name"] for row, each in zip(rows, over, strict=True) if each > ROUNDING]
    better = sum(each < -ROUNDING for each in over)
    optimal = [row for row in rows if row["gap"] <= ROUNDING]
    print(f"{len(rows)} searches: worse {len(worse)}, by at most {max(over):.3%}; shorter {better}")
    print(f"optimal {len(optimal)}; ", end="")
    print(f"of the {sum(row['is_uneven'] for row in rows)} with F, I and W of different seconds, optimal ", end="")
    print(sum(row["is_uneven"] for row in optimal))
    print("\n".join(worse))
    return rows, not worse


def rows_of(name: str) -> list[Row]:
    return list(json.loads((DATA / name).read_text()))


def costs_of(seconds: list[float], activation_bytes: int, weight_context_bytes: int) -> Costs:
    names = "forward", "backward_input", "backward_weight", "transfer"
    sizes = {"activation_bytes": activation_bytes, "weight_context_bytes": weight_context_bytes}
    return Costs.uniform(**dict(zip(names, seconds, strict=True)), **sizes)


def published(arguments: Namespace) -> tuple[list[Row], bool]:
    table = Table({"source": 14, "ranks": 5, "microbatches": 12, "activations": 11, "theirs": 7, "ours": 7, "gap": 8})
    rows, is_fine = [], True
    for case in rows_of("searched_published.json"):
        result = search(
            costs_of(case["seconds"], *case["memory"]),
            case["ranks"],
            case["microbatches"],
            memory_limit=case["limit"],
            placement=case["placement"],
            objective="span",
            seconds=arguments.seconds,
        )
        rate, activations = result.timeline.bubble_rate, case["limit"] / case["memory"][0]
        at_1f1b = case["placement"] == "line" and activations == case["ranks"]
        is_fine = is_fine and round(rate, 4) <= case["bubble_rate"] and (not at_1f1b or result.is_optimal)
        rows.append({**case, "ours": rate, "gap": result.gap})
        sizes = [str(case["ranks"]), str(case["microbatches"]), f"{activations:g}"]
        table.print([case["source"], *sizes, f"{case['bubble_rate']}", f"{rate:.4f}", f"{result.gap:.3%}"])
    return rows, is_fine


def uneven(arguments: Namespace) -> tuple[list[Row], bool]:
    case = rows_of("searched_uneven.json")[0]
    sizes = {"activation_bytes": (2,), "weight_context_bytes": (1,)}
    names = "forward_s", "backward_input_s", "backward_weight_s"
    costs = Costs(**dict(zip(names, case["seconds"], strict=True)), latency_s=case["transfer"], **sizes)
    rows = []
    for times in (1.0, 1.5, 2.0):
        limit = int(2 * times * case["ranks"])
        result = search(
            costs,
            case["ranks"],
            case["microbatches"],
            memory_limit=limit,
            objective="span",
            seconds=arguments.seconds,
        )
        rows.append({"times 1F1B": times, "ours": result.span_s, "theirs": case["span"], "gap": result.gap})
        print(f"{times} times the memory of 1F1B: {result.span_s:,.0f}, known {case['span']:,}, gap {result.gap:.3%}")
    return rows, all(row["ours"] <= row["theirs"] and row["gap"] <= ROUNDING for row in rows)


def profiles(arguments: Namespace) -> tuple[list[Row], bool]:
    table = Table({"model": 21, "ranks": 5, "1F1B even": 9, "OctoPipe": 8, "ours": 7, "gap": 8, "stages": 6, "over": 5})
    rows = []
    for case in rows_of("measured_layers.json"):
        layers, ranks, microbatches = f"E{case['layers']}L", case["ranks"], case["microbatches"]
        keys = "forward_ms", "backward_ms", "weight_ms"
        seconds = [[float(round(100 * case[key][kind])) for kind in layers] for key in keys]
        names = "forward", "backward_input", "backward_weight"
        costs = LayerCosts(**dict(zip(names, seconds, strict=True)))
        work = microbatches * sum(map(sum, seconds)) / ranks
        schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
        even = costs.of_table(schedule, split_over(schedule.placement, len(layers)))
        row = {"model": case["model"], "ranks": ranks, "1f1b": plan(schedule, even).timeline.makespan_s}
        results = [
            search(stage_costs(costs, shape), ranks, microbatches, placement=style, seconds=arguments.seconds)
            for style, shape in shapes(ranks, microbatches, len(layers))
        ]
        best = min(results, key=lambda result: result.makespan_s)
        row |= {"octopipe": case.get("octopipe_ticks"), "ours": best.makespan_s, "gap": best.gap, "work": work}
        rows.append(row | {"stages": best.schedule.num_stages})
        figures = [f"{row['1f1b']:.0f}", str(row["octopipe"] or "-"), f"{row['ours']:.0f}", f"{row['gap']:.2%}"]
        table.print([row["model"], str(ranks), *figures, str(rows[-1]["stages"]), f"{row['ours'] / work:.3f}"])
    return rows, all(row["ours"] <= row["1f1b"] for row in rows)


def shapes(ranks: int, microbatches: int, num_layers: int) -> Iterator[tuple[str, Schedule]]:
    """Yield placements of one, two and four stages a rank, as schedules that have them."""
    for style, per_rank in (("line", 1), ("v", 2), ("loop", 2), ("wave", 4), ("loop", 4)):
        if per_rank * ranks <= num_layers:
            yield style, every_action(place(style, ranks, per_rank * ranks), microbatches)


def random_sets(arguments: Namespace) -> tuple[list[Row], bool]:
    rows = []
    for seed in range(NUM_RANDOM):
        random = np.random.default_rng(seed)
        ranks, microbatches = int(random.integers(4, 17)), int(random.integers(8, 65))
        placement = ("line", "v", "loop")[seed % 3]
        costs = random_costs(random, ranks * (1 if placement == "line" else 2), has_messages=seed % 3 == 1)
        limit = int(ranks * random.uniform(0.5, 2.0) * 1000 * (1 if placement == "line" else 2)) + 500
        options = {"placement": placement, "memory_limit": limit, "seconds": arguments.seconds, "seed": seed}
        try:
            result = search(costs, ranks, microbatches, **options)
        except ScheduleError:
            continue
        family_s = best_family_s(costs, ranks, microbatches, result.schedule.placement, limit)
        rows.append({"seed": seed, "ours": result.makespan_s, "family": family_s, "gap": result.gap})
    worse = [row["seed"] for row in rows if row["family"] and row["ours"] > row["family"] * (1 + ROUNDING)]
    saved = [1 - row["ours"] / row["family"] for row in rows if row["family"]]
    gaps = sorted(row["gap"] for row in rows)
    print(f"{len(rows)} of {NUM_RANDOM} limits can be kept; worse than a family: {worse or 'none'}")
    print(f"shorter than the best family by {np.median(saved):.1%} in the median, {max(saved):.1%} at most")
    print(f"gap {gaps[len(gaps) // 2]:.1%} in the median; {sum(gap <= ROUNDING for gap in gaps)} optimal")
    print(f"no family fits in {sum(not row['family'] for row in rows)}")
    return rows, not worse and gaps[0] >= 0


def random_costs(random: np.random.Generator, num_stages: int, *, has_messages: bool) -> Costs:
    seconds = {
        name: random.uniform(0.5, 2.0, num_stages) for name in ("forward_s", "backward_input_s", "backward_weight_s")
    }
    messages = {"message_bytes": (20,), "bandwidth_bytes_per_s": 200.0, "is_exclusive": True} if has_messages else {}
    return Costs(
        **seconds,
        latency_s=float(random.uniform(0.0, 0.2)),
        activation_bytes=(1000,),
        weight_context_bytes=(int(random.integers(300, 1001)),),
        **messages,
    )


def best_family_s(costs: Costs, ranks: int, microbatches: int, placement: Placement, limit: int) -> float | None:
    """Return the makespan of the best family of this placement that fits; None where none does."""
    best = None
    for name in FAMILIES:
        try:
            schedule = build(name, ranks=ranks, microbatches=microbatches, stages=placement.num_stages)
            if schedule.placement != placement or schedule.is_forward_only:
                continue
            makespan_s = plan(schedule, costs, memory_limit=limit).timeline.makespan_s
        except (ConfigError, ScheduleError):
            continue
        best = makespan_s if best is None else min(best, makespan_s)
    return best


def speed(arguments: Namespace) -> tuple[list[Row], bool]:
    costs = random_costs(np.random.default_rng(0), 8, has_messages=False)
    problem = Problem.of(Placement.line(8), 64, costs)
    schedule = build("1f1b", ranks=8, microbatches=64)
    sequence = sequence_of(schedule)
    moves = Moves(problem, 0)
    best_s = run(problem, sequence).makespan_s
    moves.improve(sequence, sequence, best_s, 10, 0.1)  # compiles
    begin_s, num_moves = time.perf_counter(), 50_000
    moves.improve(sequence, sequence, best_s, num_moves, 0.1)
    rate = num_moves / (time.perf_counter() - begin_s)
    print(f"{rate:,.0f} candidates a second of {problem.num_actions:,} actions; {CANDIDATES_PER_S:,} wanted")
    return [{"candidates_per_s": rate}], rate >= CANDIDATES_PER_S


def large(arguments: Namespace) -> tuple[list[Row], bool]:
    ranks, microbatches, limit = 64, 256, 48_000
    costs = random_costs(np.random.default_rng(1), ranks, has_messages=False)
    begin_s = time.perf_counter()
    result = search(costs, ranks, microbatches, memory_limit=limit, seconds=40.0)
    took_s = time.perf_counter() - begin_s
    family_s = best_family_s(costs, ranks, microbatches, result.schedule.placement, limit)
    print(
        f"{result.makespan_s:.2f} s ({result.method}), best family {family_s} s, gap {result.gap:.2%}; {took_s:.0f} s"
    )
    is_fine = took_s <= 60.0 and (family_s is None or result.makespan_s <= family_s * (1 + ROUNDING))
    return [{"ours": result.makespan_s, "family": family_s, "gap": result.gap, "took_s": took_s}], is_fine


PARTS = {
    "found": found,
    "published": published,
    "uneven": uneven,
    "profiles": profiles,
    "random": random_sets,
    "speed": speed,
    "large": large,
}


def run_parts(parts: Mapping[str, Callable[[Namespace], tuple[list[Row], bool]]], arguments: Namespace) -> int:
    """Run the parts that were asked for, and write their rows; return 1 where a budget is missed."""
    written: list[Row] = []
    missed = []
    for part in arguments.parts:
        print(f"\n{part}, load {os.getloadavg()[0]:.1f}")
        rows, is_fine = parts[part](arguments)
        written += [{"part": part, **row} for row in rows]
        if not is_fine:
            missed.append(part)
    write_rows(arguments.output, written)
    print(f"\nmissed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


def main() -> int:
    """Print what was found; return 1 where a budget is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--parts", type=comma_separated, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a search (default: 3)")
    arguments = parser.parse_args()
    return run_parts(PARTS, arguments)


if __name__ == "__main__":
    sys.exit(main())
