"""Measure what the search finds, against searches of others, families and optima, and how many candidates it times.

    python bench/search.py [--parts found,table5,random,speed,large] [--seconds S] [--golden FILE] [--output FILE]

found      the searches by the zero-bubble schedulers of tests/data, or all of those in FILE (as zero_bubble.json of
           sail-sg's code records them): none may have found a shorter span
table5     the search cells of arXiv 2401.10241, table 5: bubble rates at or below them; at the memory of 1F1B, gap 0
random     200 random uneven cost sets, limits and links: at least as good as every family that fits
speed      candidates a second on one core, with times and bytes: 8 ranks, 64 microbatches, at least 10,000
large      64 ranks, 256 microbatches, 60 seconds: no family that fits is better

Exit status 1 where a budget is missed.
"""

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from on_ranks import Table, bench_parser, comma_separated, write_rows

from penstock import Costs, Placement, search
from penstock.errors import ConfigError, ScheduleError
from penstock.planning import plan
from penstock.schedules import FAMILIES, build
from penstock.searching.improving import Moves
from penstock.searching.problem import Problem
from penstock.searching.sequences import sequence_of

DATA = Path(__file__).parents[1] / "tests" / "data"
UNITS = 10
"""Of memory in the data, which have halves."""
NUM_RANDOM, CANDIDATES_PER_S, ROUNDING = 200, 10_000, 1e-9

Row = dict[str, Any]


def found(arguments: Namespace) -> tuple[list[Row], bool]:
    rows = []
    for case in cases_of(arguments.golden):
        kind, ranks, microbatches, *_ = case["name"].split("/")
        forward, inputs, weights, transfer = case["seconds"]
        costs = Costs.uniform(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            transfer=transfer,
            activation_bytes=round(case["memory"][0] * UNITS),
            weight_context_bytes=round((case["memory"][0] + case["memory"][1]) * UNITS),
        )
        result = search(
            costs,
            int(ranks[1:]),
            int(microbatches[1:]),
            memory_limit=None if case["limit"] is None else round(case["limit"] * UNITS),
            placement="line" if kind == "zb" else "v",
            objective="span",
            seconds=arguments.seconds,
        )
        rows.append({"name": case["name"], "theirs": case["span"], "ours": result.span_s, "gap": result.gap})
    over = [row["ours"] / row["theirs"] - 1 for row in rows]
    worse = [row["name"] for row, each in zip(rows, over, strict=True) if each > ROUNDING]
    better = sum(each < -ROUNDING for each in over)
    optimal = sum(row["gap"] <= ROUNDING for row in rows)
    print(f"{len(rows)} searches: worse {len(worse)}, by at most {max(over):.3%}; shorter {better}; optimal {optimal}")
    print("\n".join(worse))
    return rows, not worse


def cases_of(golden: str | None) -> list[Row]:
    if golden is None:
        return list(json.loads((DATA / "searched_zero_bubble.json").read_text()))
    cases = json.loads(Path(golden).read_text())["cases"].items()
    return [
        {
            "name": name,
            "seconds": case["costs"],
            "memory": case["mem"],
            "limit": case["max_mem"],
            "span": case["timeline"],
        }
        for name, case in cases
        if name.split("/")[0] in ("zb", "zbv") and case.get("timeline") is not None
    ]


def table5(arguments: Namespace) -> tuple[list[Row], bool]:
    table = Table({"ranks": 5, "microbatches": 12, "times 1F1B": 10, "theirs": 7, "ours": 7, "gap": 8})
    rows, is_fine = [], True
    for case in json.loads((DATA / "searched_table_5.json").read_text()):
        names = "forward", "backward_input", "backward_weight", "transfer"
        sizes = {"activation_bytes": case["activation_units"], "weight_context_bytes": case["weight_context_units"]}
        costs, ranks = Costs.uniform(**{name: case[name] for name in names}, **sizes), case["ranks"]
        for times in (1, 2):
            result = search(
                costs,
                ranks,
                case["microbatches"],
                memory_limit=times * ranks * case["activation_units"],
                objective="span",
                seconds=arguments.seconds,
            )
            rate = result.timeline.bubble_rate
            theirs = case[f"limit {times}"]
            is_fine = is_fine and round(rate, 4) <= theirs and (times == 2 or result.is_optimal)
            row = {"ranks": ranks, "microbatches": case["microbatches"], "times": times, "theirs": theirs, "ours": rate}
            rows.append({**row, "gap": result.gap})
            table.print(
                [str(ranks), str(case["microbatches"]), str(times), f"{theirs}", f"{rate:.4f}", f"{result.gap:.3%}"]
            )
    return rows, is_fine


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
    best_s = moves.objective_s(sequence)
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


PARTS = {"found": found, "table5": table5, "random": random_sets, "speed": speed, "large": large}


def main() -> int:
    """Print what was found; return 1 where a budget is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--parts", type=comma_separated, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a search (default: 3)")
    parser.add_argument("--golden", help="all recorded searches of the zero-bubble schedulers")
    arguments = parser.parse_args()
    written: list[Row] = []
    missed = []
    for part in arguments.parts:
        print(f"\n{part}")
        rows, is_fine = PARTS[part](arguments)
        written += [{"part": part, **row} for row in rows]
        if not is_fine:
            missed.append(part)
    write_rows(arguments.output, written)
    print(f"\nmissed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
