"""Measure how long the planning commands take from start to end of their process, against their budgets."""

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


def duration_s(command: list[str]) -> float:
    """Run the command once; return its wall time in seconds."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - start


def main() -> int:
    """Print one line per command; return 1 when a median is above its budget."""
    status = 0
    for name, (command, budget_s) in BUDGETS_S.items():
        duration_s(command)  # fills the caches of the file system and of compiled Python
        times_s = [duration_s(command) for _ in range(NUM_REPETITIONS)]
        median_s = statistics.median(times_s)
        status |= int(median_s > budget_s)
        verdict = "ok" if median_s <= budget_s else "TOO SLOW"
        spread = f"{min(times_s):.3f} to {max(times_s):.3f}"
        print(f"{name:<46} median {median_s:.3f} s ({spread})   budget {budget_s:.1f} s   {verdict}")
    return status


if __name__ == "__main__":
    sys.exit(main())
