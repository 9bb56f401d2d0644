"""Measure what the planning commands take from start to end of their process, against budgets of processor time.

Processor time counts, since on a machine that does other things too the wall clock says more about those.
"""

import resource
import statistics
import subprocess
import sys
import time

NUM_REPETITIONS = 7
COMMAND = [sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main(sys.argv[1:]))"]
BUDGETS_S = {
    "import penstock": ([sys.executable, "-c", "import penstock"], 0.5),
    "penstock --help": ([*COMMAND, "--help"], 0.3),
    "penstock show 1f1b, 8 ranks, 32 microbatches": (
        [*COMMAND, "show", "1f1b", "--ranks", "8", "--microbatches", "32"],
        0.5,
    ),
}


def run(command: list[str]) -> tuple[float, float]:
    """Run the command once; return its seconds of processor time, and from start to end."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def main() -> int:
    """Print one line per command; return 1 when a median of processor time is above its budget."""
    status = 0
    for name, (command, budget_s) in BUDGETS_S.items():
        run(command)  # fills the caches of the file system and of compiled Python
        processor_s, wall_s = zip(*(run(command) for _ in range(NUM_REPETITIONS)), strict=True)
        median_s = statistics.median(processor_s)
        status |= int(median_s > budget_s)
        verdict = "ok" if median_s <= budget_s else "TOO SLOW"
        spread = f"{min(processor_s):.3f} to {max(processor_s):.3f}"
        wall = f"wall clock {statistics.median(wall_s):.3f} s"
        print(f"{name:<46} median {median_s:.3f} s ({spread})   {wall}   budget {budget_s:.1f} s   {verdict}")
    return status


if __name__ == "__main__":
    sys.exit(main())
