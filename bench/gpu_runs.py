"""Measure how far simulated iterations are from those that others measured on GPUs, for 16 runs of 1F1B on 8 A100.

    python bench/gpu_runs.py [--data FILE.json] [--output FILE.json]

The authors of "Balancing Pipeline Parallelism with Vocabulary Parallelism" publish what every rank took for a forward
and a backward, and how long the iteration took. The head makes the last rank up to 2.3 times as long as the mean one.
The simulator gets the times per rank and predicts the iteration. Messages and the optimizer take no time, as neither
was published. `slowest alone` is what the rank with most to do computes: no schedule takes less. This needs no GPU.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

DATA = Path(__file__).parents[1] / "tests" / "data" / "measured_gpu_1f1b.json"
BUDGET = 0.016


@dataclass(frozen=True)
class Row:
    """One run."""

    split: str
    """Of the layers over the ranks: even, or redistributed so that the last rank has fewer."""
    vocabulary: int
    sequence: int
    slowest_s: float
    """What the rank with most to do computes in an iteration."""
    measured_s: float
    simulated_s: float

    @property
    def difference(self) -> float:
        return self.simulated_s / self.measured_s - 1

    @property
    def is_near(self) -> bool:
        return abs(self.difference) <= BUDGET


def row_of(schedule: str, run: Mapping[str, Any]) -> Row:
    forward_s, backward_s = ([1e-6 * each for each in run[key]] for key in ("forward_us", "backward_us"))
    program = lower(build(schedule, ranks=run["ranks"], microbatches=run["microbatches"]))
    timeline = simulate(program, Costs(forward_s=tuple(forward_s), backward_s=tuple(backward_s)))
    shape = run["split"], run["vocabulary"], run["sequence"]
    return Row(*shape, float(timeline.work_s.max()), run["iteration_ms"] / 1e3, timeline.makespan_s)


def shown(row: Row) -> str:
    shape = f"{row.split:<13} {row.vocabulary:>10} {row.sequence:>8}"
    seconds = f"{row.slowest_s:>11.3f} s {row.measured_s:>8.3f} s {row.simulated_s:>9.3f} s"
    return f"{shape} {seconds} {100 * row.difference:>+9.2f} %  {'ok' if row.is_near else 'TOO FAR'}"


def main() -> int:
    """Print one line per run; return 1 when one is further off than the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="measured runs; default: those of tests/data")
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    arguments = parser.parse_args()
    measured = json.loads(arguments.data.read_text(encoding="utf-8"))
    rows = [row_of(measured["schedule"], run) for run in measured["runs"]]
    print(f"{measured['devices']}; {measured['source']}")
    print("split         vocabulary sequence slowest alone   measured   simulated  difference")
    print("\n".join(map(shown, rows)))
    errors = [abs(row.difference) for row in rows]
    near, middle, largest = sum(row.is_near for row in rows), statistics.median(errors), max(errors)
    within = f"{near} of {len(rows)} within {100 * BUDGET:.1f} %"
    print(f"{within}; median difference {100 * middle:.2f} %, largest {100 * largest:.2f} %")
    if arguments.output:
        found = [asdict(row) | {"difference": row.difference} for row in rows]
        arguments.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(near < len(rows))


if __name__ == "__main__":
    sys.exit(main())
