"""Measure planning (build, check, lower, check) against torch's order and lowering in the same run, and at its limits.

    python bench/planning.py            torch up to 64 ranks; some six minutes
    python bench/planning.py --full     torch with 128 ranks as well, once each; some five minutes more

Microbatches are eight times the ranks. Times are processor times. Those of Penstock are medians of repetitions in one
process, whose loops are compiled by then; `first plan` is what a new process waits for, the median of some. torch plans
when a schedule object is made. Its own 1F1B is a loop without a plan, so for 1f1b its interleaved schedule is made with
one stage per rank, which is the same order with a longer warm-up.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from budgets import BARE_START, Budget, processor_s, processor_s_of, ratio, reference_s, verdict

from penstock.planning import prove_and_lower
from penstock.schedules import build

FAMILIES = {"1f1b": 1, "interleaved-1f1b": 2, "zbv": 2}
"""Each with its stages per rank."""
RANKS = (8, 32, 64, 128)
LARGEST_OF_TORCH = 64
NUM_REPETITIONS = 7
NUM_PROCESSES = 5
NUM_HUGE_PROCESSES = 3
TORCH_PATIENCE_S = 10.0
"""torch is measured again while its measurements take less than this in sum, up to `NUM_REPETITIONS` times."""

SMALL, MOST_BARE_STARTS = 8, 0.4
"""So a first plan takes at most 30 ms of an idle machine, where a bare Python with numpy starts in some 75 ms."""
LARGE, MOST_REFERENCES, LEAST_ZBV_RATIO = 128, 5.0, 100.0
"""So a plan takes at most 0.5 s where the reference takes 0.1 s. torch plans zbv 100 times as long from 64 ranks on."""
HUGE, MOST_HUGE_REFERENCES = ("1f1b", 1024, 8192), 110.0
"""So 50 million rows take at most 10 s of an idle machine, where the reference takes some 0.09 s."""
MOST_WITH_LIFETIMES = 1.2
"""Planning times with the proof of lifetimes over those without it: the proof looks at each row once more."""
MOST_HUGE_GIB = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    family: str
    ranks: int
    microbatches: int
    instructions: int
    first_plan_s: list[float]
    bare_start_s: list[float]
    """Starts of a bare Python with numpy, in turns with the first plans."""
    is_first_plan_compiled: bool
    penstock_s: list[float]
    reference_s: list[float]
    """The reference of `budgets`, in turns with the plans before."""
    torch_s: list[float]


def plan(family: str, ranks: int, microbatches: int) -> Any:
    """Build, check, lower, check."""
    schedule = build(family, ranks=ranks, microbatches=microbatches, stages_per_rank=FAMILIES[family])
    return prove_and_lower(schedule)


def plan_in_torch(family: str, ranks: int, microbatches: int) -> Any:
    """Make torch's schedule object, with stages that hold nothing."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

    made = ScheduleZBVZeroBubble if family == "zbv" else ScheduleInterleaved1F1B
    held = FAMILIES[family]
    stage: Any = SimpleNamespace(group_size=ranks, num_stages=ranks * held, group_rank=0, is_last=False, submod=None)
    return made([stage] * held, microbatches)


def measure(family: str, ranks: int, *, with_torch: bool) -> Row:
    microbatches = 8 * ranks
    firsts, bare_start_s, penstock_s, reference_times_s, torch_s = [], [], [], [], []
    for _ in range(NUM_PROCESSES):
        bare_start_s.append(processor_s_of(BARE_START))
        firsts.append(in_new_process(family, ranks, microbatches))
    plan(family, ranks, microbatches)
    for _ in range(NUM_REPETITIONS):
        penstock_s.append(processor_s(lambda: plan(family, ranks, microbatches)))
        reference_times_s.append(reference_s())
    while with_torch and len(torch_s) < NUM_REPETITIONS and sum(torch_s) < TORCH_PATIENCE_S:
        torch_s.append(processor_s(lambda: plan_in_torch(family, ranks, microbatches)))
    return Row(
        family,
        ranks,
        microbatches,
        firsts[0]["instructions"],
        [first["plan_s"] for first in firsts],
        bare_start_s,
        firsts[0]["is_compiled"],
        penstock_s,
        reference_times_s,
        torch_s,
    )


def measure_huge() -> dict[str, list[dict[str, Any]]]:
    """Plan the largest program in new processes, in turns with and without the proof of lifetimes."""
    plans: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    for _ in range(NUM_HUGE_PROCESSES):
        plans["without"].append(in_new_process(*HUGE, "--without-lifetimes"))
        plans["with"].append(in_new_process(*HUGE))
    return plans


def in_new_process(family: str, ranks: int, microbatches: int, *options: str) -> dict[str, Any]:
    """Plan once in a process of its own; return how long it took and what it used."""
    command = [sys.executable, __file__, "--once", family, str(ranks), str(microbatches), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def report_once(family: str, ranks: int, microbatches: int) -> None:
    """Print what `in_new_process` reads; the reference comes last, so a first plan is the first that anything does."""
    programs: list[Any] = []
    plan_s = processor_s(lambda: programs.append(plan(family, ranks, microbatches)))
    figures = {
        "plan_s": plan_s,
        "instructions": programs[0].num_instructions,
        "is_compiled": "numba" in sys.modules,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "reference_s": reference_s(),
    }
    print(json.dumps(figures))


def line(row: Row) -> str:
    median_s = statistics.median(row.penstock_s)
    spread = f"{min(row.penstock_s):.3f} to {max(row.penstock_s):.3f}"
    torch = f"{'not measured':>20}"
    if row.torch_s:
        torch = f"{statistics.median(row.torch_s):8.3f} s  {ratio(row.torch_s, row.penstock_s):6.0f} x"
    first = f"{statistics.median(row.first_plan_s):6.3f} s{' (compiled)' if row.is_first_plan_compiled else ''}"
    return (
        f"{row.family:<17}{row.ranks:>5}{row.microbatches:>7}{row.instructions:>11,}   {median_s:6.3f} s ({spread})"
        f"{torch:>22}   {first}"
    )


def budgets_of(rows: list[Row], huge: dict[str, list[dict[str, Any]]]) -> list[Budget]:
    """Return the budgets of all that was measured."""
    budgets = []
    for row in rows:
        name = f"{row.family} on {row.ranks} ranks"
        if row.ranks == SMALL:
            starts = ratio(row.first_plan_s, row.bare_start_s)
            budgets.append(Budget(f"first plan, {name}", starts, MOST_BARE_STARTS, "times a bare Python with numpy"))
        if row.ranks == LARGE:
            references = ratio(row.penstock_s, row.reference_s)
            budgets.append(Budget(name, references, MOST_REFERENCES, "times the reference"))
        if row.family == "zbv" and row.ranks >= LARGEST_OF_TORCH and row.torch_s:
            speed = ratio(row.torch_s, row.penstock_s)
            budgets.append(Budget(f"{name}, torch", speed, LEAST_ZBV_RATIO, "times Penstock", is_least=True))
    columns = {key: {name: [plan[name] for plan in plans] for name in plans[0]} for key, plans in huge.items()}
    proved, name = columns["with"], f"{HUGE[0]} on {HUGE[1]} ranks"
    lifetimes = ratio(proved["plan_s"], columns["without"]["plan_s"])
    references = ratio(proved["plan_s"], proved["reference_s"])
    peak_gib = max(proved["peak_bytes"]) / 2**30
    return [
        *budgets,
        Budget(f"{name}, proof of lifetimes", lifetimes, MOST_WITH_LIFETIMES, "times planning without it"),
        Budget(name, references, MOST_HUGE_REFERENCES, "times the reference"),
        Budget(f"{name}, peak", peak_gib, MOST_HUGE_GIB, "GiB"),
    ]


def main() -> int:
    """Print the table and write the JSON; return 1 when a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="measure torch with 128 ranks as well")
    parser.add_argument("--json", type=Path, default=Path("build/bench/planning.json"), help="where the results go")
    parser.add_argument("--once", nargs=3, metavar=("FAMILY", "RANKS", "MICROBATCHES"), help="plan once, print JSON")
    parser.add_argument("--without-lifetimes", action="store_true", help="with --once: leave that proof out")
    arguments = parser.parse_args()
    if arguments.once:
        family, ranks, microbatches = arguments.once
        with patch("penstock.proofs.check_lifetimes") if arguments.without_lifetimes else nullcontext():
            report_once(family, int(ranks), int(microbatches))
        return 0

    rows = []
    plan_in_torch("zbv", 2, 4)  # loads torch
    print("family           ranks      m       rows   penstock, median (spread)   torch, median and ratio   first plan")
    for family in FAMILIES:
        for ranks in RANKS:
            rows.append(measure(family, ranks, with_torch=arguments.full or ranks <= LARGEST_OF_TORCH))
            print(line(rows[-1]), flush=True)
    huge = measure_huge()
    print(f"{HUGE[0]} on {HUGE[1]} ranks with {HUGE[2]} microbatches: {huge['with'][0]['instructions']:,} rows")
    for key, plans in huge.items():
        times = ", ".join(f"{figures['plan_s']:.1f}" for figures in plans)
        peak_gib = max(figures["peak_bytes"] for figures in plans) / 2**30
        print(f"    {key} the proof of lifetimes: {times} s, peak {peak_gib:.2f} GiB")
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results = {"rows": [asdict(row) for row in rows], "huge": huge, "load": os.getloadavg(), "cores": os.cpu_count()}
    arguments.json.write_text(json.dumps(results, indent=2))
    return verdict(budgets_of(rows, huge))


if __name__ == "__main__":
    sys.exit(main())
