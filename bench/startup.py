"""Measure what the planning commands take from start to end of their process, next to a bare Python with numpy."""

import statistics
import sys

from budgets import BARE_START, Budget, processor_s_of, ratio, verdict

NUM_REPETITIONS = 7
COMMAND = [sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main(sys.argv[1:]))"]
SHOW = [*COMMAND, "show", "1f1b", "--ranks", "8", "--microbatches", "32"]
COMMANDS = {
    "import penstock": ([sys.executable, "-c", "import penstock"], 0.5),
    "penstock --help": ([*COMMAND, "--help"], 1.5),
    "penstock show 1f1b, 8 ranks, 32 microbatches": (SHOW, 6.0),
}
"""Commands with their budgets in starts of a bare Python, each some 0.075 s when idle: so 0.04, 0.11 and 0.45 s."""


def main() -> int:
    """Print one line per command, and its budget; return 1 when a median is above it."""
    times_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    bare_times_s = []
    for command, _ in COMMANDS.values():
        processor_s_of(command)  # fills the caches of the file system and of compiled Python
    for _ in range(NUM_REPETITIONS):
        bare_times_s.append(processor_s_of(BARE_START))
        for name, (command, _) in COMMANDS.items():
            times_s[name].append(processor_s_of(command))
    for name, times in {"bare Python with numpy": bare_times_s, **times_s}.items():
        spread = f"{min(times):.3f} to {max(times):.3f}"
        print(f"{name:<46} median {statistics.median(times):.3f} s of processor time ({spread})")
    unit = "times a bare Python with numpy"
    return verdict([Budget(name, ratio(times_s[name], bare_times_s), COMMANDS[name][1], unit) for name in COMMANDS])


if __name__ == "__main__":
    sys.exit(main())
