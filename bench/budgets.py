"""Budgets of benchmarks, as ratios to what is measured in the same run; alone, it runs those of `make bench`.

    python bench/budgets.py      startup.py, planning.py and simulate.py in turn, then one verdict; some ten minutes

Seconds say as much about the machine, and about all else that runs on it, as about the code. So a budget is a ratio of
two processor times that were measured in turns: next to the start of a bare Python, to a fixed loop over columns, or to
the same work without the part that has the budget. Bytes are no ratio, since memory is the same on every machine.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BENCHES = ("startup.py", "planning.py", "simulate.py")
BARE_START = [sys.executable, "-c", "import numpy"]
KEPT, MISSED = "budget kept    ", "budget MISSED  "
"""How the line of a budget begins, by which `run_bench` finds it in what a benchmark prints."""
NUM_KEYS = 1 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """A measured number, and the most that it may be, or the least."""

    name: str
    value: float
    limit: float
    unit: str
    is_least: bool = False

    @property
    def is_kept(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.is_least else "at most"
        return f"{KEPT if self.is_kept else MISSED}{self.name}: {self.value:.3g}, {bound} {self.limit:.3g} {self.unit}"


def verdict(budgets: Sequence[Budget]) -> int:
    """Print a line per budget; return the exit status, 1 when one is missed."""
    print("", *budgets, sep="\n", flush=True)
    return int(not all(budget.is_kept for budget in budgets))


def processor_s(act: Callable[[], object]) -> float:
    """Return what the processor works for this process in a call: the same, whatever else the machine does."""
    start_s = time.process_time()
    act()
    return time.process_time() - start_s


def processor_s_of(command: Sequence[str]) -> float:
    """Return what the processor works for a process, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def reference_s() -> float:
    """Return the processor time of the reference: a million keys are sorted, gathered and added up, as columns are.

    It takes some 0.1 s on the machine on which the budgets were chosen, a virtual one on an AMD EPYC: a budget of 10
    times the reference was one of 1 s there.
    """
    keys = np.random.default_rng(seed=0).integers(0, 1 << 30, NUM_KEYS)
    return processor_s(lambda: keys.take(np.argsort(keys, kind="stable")).cumsum())


def ratio(times_s: Sequence[float], reference_times_s: Sequence[float]) -> float:
    """Return the ratio of the medians of times that were measured in turns."""
    return statistics.median(times_s) / statistics.median(reference_times_s)


def run_bench(path: Path) -> tuple[int, list[str]]:
    """Run a benchmark and pass on what it prints; return its exit status and the lines of its budgets."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith((KEPT, MISSED)):
                lines.append(line.rstrip())
    return process.returncode, lines


def run_all(paths: Sequence[Path]) -> int:
    """Run all benchmarks, whatever becomes of those before, and print one verdict; return 1 when a budget is missed."""
    status, summary = 0, []
    for path in paths:
        print(f"\n{path.name}", flush=True)
        bench_status, lines = run_bench(path)
        missed = [line.removeprefix(MISSED) for line in lines if line.startswith(MISSED)]
        kept = [line.removeprefix(KEPT).split(":")[0] for line in lines if line.startswith(KEPT)]
        summary.append(f"{path.name} kept {len(kept)} of {len(lines)} budgets: {'; '.join(kept) or 'none'}")
        summary += [f"    MISSED  {budget}" for budget in missed]
        if bench_status and not missed:
            summary.append(f"    FAILED  it ended with status {bench_status}; see what it printed above")
        status |= int(bool(bench_status or missed))
    conclusion = "a budget is missed" if status else "every budget is kept"
    print("\nVerdict", *summary, conclusion, sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(run_all([Path(__file__).with_name(name) for name in BENCHES]))
