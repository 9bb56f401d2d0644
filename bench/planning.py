"""Measure planning (build, check, lower, check) against torch's order and lowering in the same run, and at its limits.

    python bench/planning.py            torch up to 64 ranks; some two minutes
    python bench/planning.py --full     torch with 128 ranks as well, once each; some five minutes more

Microbatches are eight times the ranks. Times of Penstock are medians of repetitions in one process, whose loops are
compiled by then; `first plan` is what a new process waits for, the median of some. torch plans when a schedule object
is made. Its own 1F1B is a loop without a plan, so for 1f1b its interleaved schedule is made with one stage per rank,
which is the same order with a longer warm-up.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.planning import prove_and_lower
from penstock.schedules import build

FAMILIES = {"1f1b": 1, "interleaved-1f1b": 2, "zbv": 2}
"""Each with its stages per rank."""
RANKS = (8, 32, 64, 128)
LARGEST_OF_TORCH = 64
NUM_REPETITIONS = 7
NUM_PROCESSES = 3
TORCH_PATIENCE_S = 10.0
"""torch is measured again while its measurements take less than this in sum, up to `NUM_REPETITIONS` times."""

SMALL, SMALL_BUDGET_S = 8, 0.05
LARGE, LARGE_BUDGET_S = 128, 1.0
LARGE_ZBV_RATIO = 100
HUGE = ("1f1b", 1024, 8192)
HUGE_BUDGET_S, HUGE_BUDGET_BYTES = 10.0, 2 * 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    family: str
    ranks: int
    microbatches: int
    instructions: int
    first_plan_s: list[float]
    is_first_plan_compiled: bool
    penstock_s: list[float]
    torch_s: list[float]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.torch_s) / statistics.median(self.penstock_s) if self.torch_s else None


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


def timed_s(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(family: str, ranks: int, *, with_torch: bool) -> Row:
    microbatches = 8 * ranks
    firsts = [in_new_process(family, ranks, microbatches) for _ in range(NUM_PROCESSES)]
    plan(family, ranks, microbatches)
    penstock_s = [timed_s(lambda: plan(family, ranks, microbatches)) for _ in range(NUM_REPETITIONS)]
    torch_s: list[float] = []
    while with_torch and len(torch_s) < NUM_REPETITIONS and sum(torch_s) < TORCH_PATIENCE_S:
        torch_s.append(timed_s(lambda: plan_in_torch(family, ranks, microbatches)))
    return Row(
        family,
        ranks,
        microbatches,
        firsts[0]["instructions"],
        [first["plan_s"] for first in firsts],
        firsts[0]["is_compiled"],
        penstock_s,
        torch_s,
    )


def in_new_process(family: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """Plan once in a process of its own; return how long it took and what it used."""
    command = [sys.executable, __file__, "--once", family, str(ranks), str(microbatches)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def report_once(family: str, ranks: int, microbatches: int) -> None:
    """Print what `in_new_process` reads."""
    start, cpu_start = time.perf_counter(), time.process_time()
    program = plan(family, ranks, microbatches)
    found = {
        "plan_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu_start,
        "instructions": program.num_instructions,
        "is_compiled": "numba" in sys.modules,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(found))


def line(row: Row) -> str:
    median_s, ratio = statistics.median(row.penstock_s), row.ratio
    spread = f"{min(row.penstock_s):.3f} to {max(row.penstock_s):.3f}"
    torch = f"{statistics.median(row.torch_s):8.3f} s  {ratio:6.0f} x" if ratio else f"{'not measured':>20}"
    first = f"{statistics.median(row.first_plan_s):6.3f} s{' (compiled)' if row.is_first_plan_compiled else ''}"
    return (
        f"{row.family:<17}{row.ranks:>5}{row.microbatches:>7}{row.instructions:>11,}   {median_s:6.3f} s ({spread})"
        f"{torch:>22}   {first}"
    )


def misses(rows: list[Row], huge: dict[str, Any] | None) -> list[str]:
    """Return the budgets that were not kept."""
    found = []
    for row in rows:
        name = f"{row.family} on {row.ranks} ranks"
        median_s = statistics.median(row.penstock_s)
        first_s = statistics.median(row.first_plan_s)
        if row.ranks == SMALL and (first_s > SMALL_BUDGET_S or row.is_first_plan_compiled):
            found.append(f"{name}: the first plan took {first_s:.3f} s, budget {SMALL_BUDGET_S} s uncompiled")
        if row.ranks == LARGE and median_s > LARGE_BUDGET_S:
            found.append(f"{name}: {median_s:.3f} s, budget {LARGE_BUDGET_S} s")
        if row.ranks == LARGE and row.family == "zbv" and row.ratio is not None and row.ratio < LARGE_ZBV_RATIO:
            found.append(f"{name}: {row.ratio:.0f} times faster than torch, budget {LARGE_ZBV_RATIO}")
    if huge is not None and huge["plan_s"] > HUGE_BUDGET_S:
        found.append(f"{HUGE}: {huge['plan_s']:.1f} s, budget {HUGE_BUDGET_S} s")
    if huge is not None and huge["peak_bytes"] > HUGE_BUDGET_BYTES:
        found.append(f"{HUGE}: {huge['peak_bytes'] / 2**30:.2f} GiB, budget {HUGE_BUDGET_BYTES / 2**30:.0f} GiB")
    return found


def main() -> int:
    """Print the table and write the JSON; return 1 when a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="measure torch with 128 ranks as well")
    parser.add_argument("--json", type=Path, default=Path("build/bench/planning.json"), help="where the results go")
    parser.add_argument("--once", nargs=3, metavar=("FAMILY", "RANKS", "MICROBATCHES"), help="plan once, print JSON")
    arguments = parser.parse_args()
    if arguments.once:
        family, ranks, microbatches = arguments.once
        report_once(family, int(ranks), int(microbatches))
        return 0

    rows = []
    plan_in_torch("zbv", 2, 4)  # loads torch
    print("family           ranks      m       rows   penstock, median (spread)   torch, median and ratio   first plan")
    for family in FAMILIES:
        for ranks in RANKS:
            rows.append(measure(family, ranks, with_torch=arguments.full or ranks <= LARGEST_OF_TORCH))
            print(line(rows[-1]), flush=True)
    huge = in_new_process(*HUGE)
    print(
        f"{HUGE[0]} on {HUGE[1]} ranks with {HUGE[2]} microbatches: {huge['instructions']:,} rows in "
        f"{huge['plan_s']:.1f} s ({huge['cpu_s']:.1f} s of one core), peak {huge['peak_bytes'] / 2**30:.2f} GiB"
    )
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results = {"rows": [asdict(row) for row in rows], "huge": huge, "load": os.getloadavg(), "cores": os.cpu_count()}
    arguments.json.write_text(json.dumps(results, indent=2))
    missed = misses(rows, huge)
    print("\n".join(["", *(f"TOO SLOW  {miss}" for miss in missed)]) if missed else "every budget is kept")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
