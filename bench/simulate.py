"""Measure how fast programs and schedules are simulated, once compiled and from a cold start.

    python bench/simulate.py            half a minute of planning for the largest program, which needs 4 GB of memory
    python bench/simulate.py --quick    without it

Times are of `simulate` alone, medians of repetitions; budgets are of processor time, in turns with the reference of
`budgets`. `cold` is the first call of a process, which compiles nothing.
`schedule` is `simulate` of a schedule that is not lowered, by compiled loops.
Serialized links are queues of their own, walked beside the ranks; their rate may be half that of contention-free ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from budgets import Budget, ratio, reference_s, verdict

from penstock.ir.program import Program
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

CONTENTION_FREE, SERIALIZED = "contention-free links", "serialized links"
COSTS = {
    CONTENTION_FREE: Costs.uniform(transfer=0.1),
    SERIALIZED: Costs.uniform(
        transfer=0.1, message_bytes=(1,), bandwidth_bytes_per_s=10.0, is_exclusive=True, launch_s=0.01
    ),
}
LARGE = (("1f1b", 64, 1024, 1), ("interleaved-1f1b", 64, 512, 4), ("zb-h1", 128, 1024, 1))
LARGEST = ("1f1b", 1024, 8192, 1)
SMALL = (("1f1b", 8, 64, 1), ("interleaved-1f1b", 8, 64, 2), ("zb-h1", 8, 64, 1))
SCHEDULE = ("zbv", 8, 64, 2)

INSTRUCTIONS_PER_REFERENCE = {CONTENTION_FREE: 1_000_000, SERIALIZED: 500_000}
MOST_LARGEST = 100.0
MOST_SMALL = 0.2
MOST_SCHEDULE = {
    CONTENTION_FREE: 0.01,
    SERIALIZED: 0.015,
}
"""The budgets: at least the first, at most the others, times the reference. It takes some 0.1 s of an idle machine, so
these are 10 and 5 million instructions a second, 10 s, 20 ms, and 1 to 1.5 ms."""
SCHEDULES_PER_REPETITION = 100

COLD = """
import time
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
program = lower(build({name!r}, ranks={ranks}, microbatches={microbatches}, stages_per_rank={stages_per_rank}))
start, used = time.perf_counter(), time.process_time()
simulate(program, Costs.uniform(transfer=0.1))
print(time.perf_counter() - start, time.process_time() - used)
"""


@dataclass(frozen=True)
class Result:
    """The times of one program under one kind of costs."""

    program: str
    costs: str
    num_instructions: int
    times_s: list[float]
    processor_s: list[float]
    """Of these, what the processor worked for this process: less where others use it as well."""
    reference_s: list[float]
    """The reference of `budgets`, in turns with these."""
    limit: float
    """The most times the reference that it may take."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def budget(self) -> Budget:
        references = ratio(self.processor_s, self.reference_s)
        return Budget(f"{self.program}, {self.costs}", references, self.limit, "times the reference")

    def __str__(self) -> str:
        used_s = statistics.median(self.processor_s)
        rate = self.num_instructions / used_s / 1e6
        spread = f"{min(self.times_s):.6f} to {max(self.times_s):.6f}"
        return (
            f"{self.program:<36} {self.costs:<22} {self.num_instructions:>11,} median {self.median_s:.6f} s "
            f"({spread}), processor {used_s:.6f} s  {rate:5.1f} M/s"
        )


def name_of(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> str:
    return f"{name} p={ranks} m={microbatches}" + (f" v={stages_per_rank}" if stages_per_rank > 1 else "")


def build_program(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Program:
    return lower(build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank))


def compiled(shape: tuple[str, int, int, int], costs: str, num_repetitions: int, limit: float | None = None) -> Result:
    """Simulate in this process; the first time compiles, and does not count."""
    program = build_program(*shape)
    simulate(program, COSTS[costs])
    times = in_turns(lambda: timed(lambda: simulate(program, COSTS[costs])), num_repetitions)
    most = program.num_instructions / INSTRUCTIONS_PER_REFERENCE[costs] if limit is None else limit
    return Result(name_of(*shape), costs, program.num_instructions, *times, most)


def cold(shape: tuple[str, int, int, int], num_repetitions: int) -> Result:
    """Simulate once in a process of its own, which has done nothing but build the program."""
    keys = ("name", "ranks", "microbatches", "stages_per_rank")
    command = [sys.executable, "-c", COLD.format(**dict(zip(keys, shape, strict=True)))]

    def run_once() -> tuple[float, float]:
        run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        passed_s, used_s = map(float, run.stdout.split())
        return passed_s, used_s

    times = in_turns(run_once, num_repetitions)
    num_instructions = build_program(*shape).num_instructions
    return Result(f"{name_of(*shape)}, cold", CONTENTION_FREE, num_instructions, *times, MOST_SMALL)


def unlowered(shape: tuple[str, int, int, int], costs: str, num_repetitions: int) -> Result:
    """Simulate a schedule that is not lowered, often; the first time does not count."""
    name, ranks, microbatches, stages_per_rank = shape
    schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)

    def evaluate() -> object:
        return simulate(schedule, COSTS[costs], compiled=True)

    evaluate()
    times = in_turns(lambda: timed(evaluate), num_repetitions, SCHEDULES_PER_REPETITION)
    return Result(f"{name_of(*shape)}, schedule", costs, schedule.num_rows, *times, MOST_SCHEDULE[costs])


def in_turns(
    measure: Callable[[], tuple[float, float]], num_repetitions: int, num_measurements: int = 1
) -> tuple[list[float], list[float], list[float]]:
    """Measure so often, and the reference once per repetition; return seconds passed, processor's and reference's."""
    times, reference_times_s = [], []
    for _ in range(num_repetitions):
        times += [measure() for _ in range(num_measurements)]
        reference_times_s.append(reference_s())
    passed_s, used_s = zip(*times, strict=True)
    return list(passed_s), list(used_s), reference_times_s


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that passed and those that the processor worked for it."""
    start, used = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - used


def main() -> int:
    """Print one line per measurement, then the budgets; return 1 when a median is above its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7, help="times each is measured (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times into a file")
    parser.add_argument("--quick", action="store_true", help="leave out the largest program")
    arguments = parser.parse_args()

    print(f"load of the machine: {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    results = []
    for costs in COSTS:
        results.append(unlowered(SCHEDULE, costs, arguments.repetitions))
        print(results[-1], flush=True)
    for shape in SMALL:
        results.append(cold(shape, arguments.repetitions))
        print(results[-1], flush=True)
    for shape in LARGE:
        for costs in COSTS:
            results.append(compiled(shape, costs, arguments.repetitions))
            print(results[-1], flush=True)
    if not arguments.quick:
        results.append(compiled(LARGEST, CONTENTION_FREE, min(3, arguments.repetitions), MOST_LARGEST))
        print(results[-1], flush=True)
    if arguments.json:
        rows = [
            asdict(result) | {"median_s": result.median_s, "is_in_time": result.budget.is_kept} for result in results
        ]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return verdict([result.budget for result in results])


if __name__ == "__main__":
    sys.exit(main())
