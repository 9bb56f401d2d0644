"""Measure how long `Pipeline(...)` takes on several ranks of this machine, one pipeline after another in one group.

The layers are small, so what is left is the connection of the ranks and their handshake. The first construction of a
process also plans the schedule and loads code, so it is printed apart from the median of the following ones.

    python bench/construct.py --source src --source /path/to/other/worktree/src

Each `--source` is a folder that holds a `penstock` package; several are measured in turns, round by round.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from on_ranks import Table, become_rank, bench_parser, give_rows, rows_of_ranks, spread_of, write_rows
from torch import nn

from penstock import Pipeline

NUM_CONSTRUCTIONS = 10
CASES = {
    "1f1b": {"schedule": "1f1b", "microbatches": 8},
    "1f1b, tied": {"schedule": "1f1b", "microbatches": 8, "tied": [("0.weight", "7.weight")]},
    "dualpipe-v": {"schedule": "dualpipe-v", "microbatches": 8},
}
WIDTH = 8
NUM_LAYERS = 8


def construct(options: dict[str, Any]) -> float:
    """Make one pipeline on all ranks together; return the seconds until the last rank had it."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    dist.barrier()
    begin_s = time.monotonic()  # one clock for all processes of a machine
    pipeline = Pipeline(layers, loss=nn.MSELoss(), **options)
    moments: list[Any] = [None] * dist.get_world_size()
    own = (begin_s, time.monotonic())
    dist.all_gather_object(moments, own)
    pipeline.close()
    return max(end_s for _, end_s in moments) - max(begin_s for begin_s, _ in moments)


def measured() -> Iterator[dict[str, Any]]:
    for name, options in CASES.items():
        first, *later = [construct(options) for _ in range(NUM_CONSTRUCTIONS)]
        yield {"case": name, "ranks": dist.get_world_size(), "first_s": first, "later_s": later}


def rows_of(source: str, round_number: int, words: Namespace) -> list[dict[str, Any]]:
    """Measure one source in processes of its own, by this very script."""
    command = [sys.executable, __file__, "--source", source, "--alone", "--ranks", str(words.ranks)]
    environment = os.environ | {"PYTHONPATH": source}
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return [{"source": source, "round": round_number} | row for row in json.loads(answer.stdout)]


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table({"case": 10, "ranks": 5, "source": 30, "first, ms": 9, "later, ms": 15, "share": 5})
    baseline: dict[str, float] = {}
    for case, source in dict.fromkeys((row["case"], row["source"]) for row in rows):
        found = [row for row in rows if (row["case"], row["source"]) == (case, source)]
        later = [seconds for row in found for seconds in row["later_s"]]
        median = statistics.median(later)
        first = statistics.median(row["first_s"] for row in found)
        share = median / baseline.setdefault(case, median)
        spread = f"{1000 * median:.1f} ({100 * spread_of(later):.0f} %)"
        table.print([case, str(found[0]["ranks"]), source[-30:], f"{1000 * first:.1f}", spread, f"{share:.2f}"])


def main() -> int:
    parser = bench_parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--source", action="append", help="a folder with a penstock package (default: this one's)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--alone", action="store_true", help="print the rows of the one source as JSON")
    words = parser.parse_args()
    if words.rows:
        become_rank()
        give_rows(words.rows, measured())
        return 0
    if words.alone:
        print(json.dumps(rows_of_ranks(__file__, [], num_ranks=words.ranks)))
        return 0
    sources = words.source or [str(Path(__file__).parents[1] / "src")]
    turns = [(number, source) for number in range(words.rounds) for source in sources]
    rows = [row for number, source in turns for row in rows_of(str(Path(source).resolve()), number, words)]
    print_table(rows)
    write_rows(words.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
