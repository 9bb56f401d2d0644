"""Measure many steps one after another: their time with a changing keyword against a fixed one, and their memory.

    python bench/soak.py                  # some minutes
    python bench/soak.py --steps 20000    # a longer soak

`keywords` takes steps in pairs, one with the same number as always and one with a new number, in random order: a new
value must be no new layout, so both take the same time. `soak` goes on with new numbers and new batches. Memory is what
a rank holds by itself (anonymous and shared memory, after a garbage collection, what the allocator has free given
back); growth is from the end of the warm-up to the end, of the rank where it is largest. With them stand CPython's
allocated blocks, open files and threads, which a leak would add to.

The command ends with status 1 where the times differ by more than 5 % or a rank's memory grows by 1 MiB.
"""

import ctypes
import gc
import os
import random
import statistics
import sys
import threading
import time
from argparse import Namespace
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import SEED, Table, become_rank, bench_parser, give_rows, paired_ratio, rows_of_ranks, write_rows
from torch import Tensor, nn

from penstock import Pipeline

WIDTH = 32
NUM_MICROBATCHES = 4
ROWS = 8
MOST_GROWTH_BYTES = 2**20
MOST_DIFFERENCE = 0.05
FIXED, CHANGING = "fixed", "changing"
SHOWN = {"memory_bytes": 1024, "num_blocks": 1, "num_files": 1}
"""Columns of what grows, with their units."""


class Scaled(nn.Module):
    """A layer that takes a scalar by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(inputs)) * scale


@dataclass(frozen=True)
class Held:
    """What one rank holds."""

    memory_bytes: int
    num_blocks: int
    """Of CPython's allocator."""
    num_files: int
    num_threads: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # else free memory counts as held, and how much of it there is depends on chance
        blocks, files = sys.getallocatedblocks(), len(os.listdir("/proc/self/fd"))
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        memory_bytes = sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        return cls(memory_bytes, blocks, files, threading.active_count())

    def since(self, before: "Held") -> dict[str, int]:
        return {name: value - asdict(before)[name] for name, value in asdict(self).items()}


class Rank:
    """One rank of a small pipeline, and its steps."""

    def __init__(self) -> None:
        self._pipeline = Pipeline([Scaled() for _ in range(4)], "1f1b", NUM_MICROBATCHES, nn.MSELoss())
        self._batches = torch.Generator().manual_seed(SEED)
        self._optimizer = torch.optim.SGD(list(self._pipeline.parameters()), lr=1e-3)
        self._num_steps = 0

    def step(self, scale: float) -> float:
        """Run one training step on a batch of its own; return the seconds of the pipeline's part."""
        inputs, target = torch.randn(2, ROWS, WIDTH, generator=self._batches).unbind()
        begin_s = time.perf_counter()
        self._pipeline.step(inputs, target=target, scale=scale)
        took_s = time.perf_counter() - begin_s
        self._optimizer.step()
        self._optimizer.zero_grad()
        return took_s

    def new_number(self) -> float:
        self._num_steps += 1
        return 1.0 + 1e-6 * self._num_steps

    def close(self) -> None:
        self._pipeline.close()


def measured(words: Namespace) -> Iterator[dict[str, Any]]:
    rank, chance = Rank(), random.Random(SEED)  # all ranks draw the same order
    seconds = {FIXED: array("d", [0.0]) * words.pairs, CHANGING: array("d", [0.0]) * words.pairs}  # makes no objects
    for kind in [FIXED, CHANGING] * (words.warm_up // 2):
        rank.step(1.0 if kind == FIXED else rank.new_number())
    before = Held.now()
    for number in range(words.pairs):
        for kind in chance.sample([FIXED, CHANGING], 2):
            seconds[kind][number] = rank.step(1.0 if kind == FIXED else rank.new_number())
    found = growths(before)
    yield {"case": "keywords", "steps": 2 * words.pairs, "seconds": as_lists(seconds), "growth": found}
    seconds = {CHANGING: array("d", [0.0]) * words.steps}
    before = Held.now()
    for number in range(words.steps):
        seconds[CHANGING][number] = rank.step(rank.new_number())
    found = growths(before)
    yield {"case": "soak", "steps": words.steps, "seconds": as_lists(seconds), "growth": found}
    rank.close()


def as_lists(seconds: Mapping[str, "array[float]"]) -> dict[str, list[float]]:
    return {kind: list(values) for kind, values in seconds.items()}


def growths(before: Held) -> list[dict[str, int]]:
    """Return, per rank, what it holds more than before."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, Held.now().since(before))
    return found


def worst(row: Mapping[str, Any], name: str) -> int:
    return max(growth[name] for growth in row["growth"])


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(
        {"case": 8, "steps": 6, "fixed, ms": 9, "changing, ms": 12, "ratio": 6, "KiB": 6, "blocks": 6, "files": 5}
    )
    for row in rows:
        medians = [f"{1000 * statistics.median(row['seconds'][kind]):.3f}" for kind in row["seconds"]]
        ratio = f"{ratio_of(row):.3f}" if len(medians) == 2 else ""
        growth = [f"{worst(row, name) / unit:.0f}" for name, unit in SHOWN.items()]
        table.print([row["case"], f"{row['steps']:,}", *["", *medians][-2:], ratio, *growth])


def ratio_of(row: Mapping[str, Any]) -> float:
    return paired_ratio(row["seconds"][CHANGING], row["seconds"][FIXED])


def misses(rows: list[dict[str, Any]]) -> list[str]:
    """Say which of the limits are not kept."""
    found = []
    for row in rows:
        if FIXED in row["seconds"] and abs(ratio_of(row) - 1) > MOST_DIFFERENCE:
            found.append(f"a step with a new number takes {ratio_of(row):.3f} times as long as one with a fixed number")
        if worst(row, "memory_bytes") >= MOST_GROWTH_BYTES:
            found.append(f"{row['case']}: the memory of a rank grew by {worst(row, 'memory_bytes'):,} bytes")
        found += [f"{row['case']}: more {name[4:]}" for name in ("num_files", "num_threads") if worst(row, name) > 0]
    return found


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=1000, help="pairs of steps, fixed and changing (default: 1000)")
    parser.add_argument("--steps", type=int, default=5000, help="steps of the soak (default: 5000)")
    parser.add_argument("--warm-up", type=int, default=500, help="steps before anything is measured (default: 500)")
    words = parser.parse_args()
    if words.rows:
        become_rank()
        give_rows(words.rows, measured(words))
        return 0
    sizes = [f"--{name}={number}" for name, number in (("pairs", words.pairs), ("steps", words.steps))]
    rows = rows_of_ranks(__file__, [*sizes, f"--warm-up={words.warm_up}"], num_ranks=words.ranks)
    print_table(rows)
    write_rows(words.output, rows)
    for miss in misses(rows):
        print(miss, file=sys.stderr)
    return 1 if misses(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
