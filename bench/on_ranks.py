"""Runs a bench's work on processes of this machine and brings back its rows; for the benches that need ranks."""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.cli.failure import write_finished
from penstock.cli.launch import connect_store, join_ranks, launch_ranks
from penstock.errors import PenstockWarning

NUM_WARM_UP_ROUNDS = 2
"""The first step of a pipeline agrees on shapes, and the second is the first to post receives ahead."""
REST_S = 0.2
"""Before each measurement, for whatever else the machine has to do: who is preferred all the time, the system stops."""
SEED = 0


def rows_of_ranks(script: str, words: Sequence[str], *, num_ranks: int) -> list[dict[str, Any]]:
    """Run `script` with `words` once per rank; return the rows that rank 0 gave to `give_rows`."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows")
        failure = launch_ranks([sys.executable, script, *words, "--rows", str(rows)], num_ranks=num_ranks)
        if failure is not None:
            raise SystemExit(f"{Path(script).name} on {num_ranks} ranks failed: {failure.shown}")
        return [json.loads(line) for line in rows.read_text().splitlines()]


def give_rows(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as they come; only rank 0's count."""
    with open(path if dist.get_rank() == 0 else os.devnull, "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
    rank = dist.get_rank()
    dist.destroy_process_group()  # a thread of gloo that outlives Python ends the process with an abort
    write_finished(connect_store(os.environ, timedelta(seconds=2)), rank)


def become_rank(*, measures_time: bool = True) -> None:
    """Join the others, with one thread; to measure time, run before other processes of this machine where allowed.

    Else what is measured is how busy the machine is.
    """
    if measures_time:
        with contextlib.suppress(AttributeError, PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PenstockWarning)  # few microbatches are meant here
    join_ranks(os.environ)


def put_threads_before_others() -> None:
    """Schedule every thread of this process, and those that they start, in real time where that is allowed.

    All of them: a thread that carries messages would wait for each one that is preferred to it.
    """
    with contextlib.suppress(AttributeError, OSError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def in_turn(turns: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Call each once a round, all ranks together where there are several; return the seconds of each call.

    A call takes from when all ranks were there until the last one has returned, so one that leaves work to a device
    waits for it. The order changes with every round, so that a busy moment of the machine does not always meet the same
    one; the first rounds are for warming up.
    """
    chance, order, has_peers = random.Random(SEED), list(turns), dist.is_initialized()
    own: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(NUM_WARM_UP_ROUNDS + num_rounds):
        chance.shuffle(order)
        for name in order:
            time.sleep(REST_S)
            if has_peers:
                dist.barrier()
            begin_s = time.monotonic()  # one clock for all processes of a machine
            turns[name]()
            own[name].append((begin_s, time.monotonic()))
    everyone: list[Any] = [own]
    if has_peers:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    return {name: _seconds([theirs[name][NUM_WARM_UP_ROUNDS:] for theirs in everyone]) for name in turns}


def _seconds(moments: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    rounds = zip(*moments, strict=True)
    return [max(end_s for _, end_s in calls) - max(begin_s for begin_s, _ in calls) for calls in rounds]


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds of one over the other: what slows a whole round down does not count."""
    return statistics.median(first / second for first, second in zip(above, below, strict=True))


def spread_of(seconds: Sequence[float]) -> float:
    """The middle half of some measurements, as a share of their median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


class Table:
    """Prints rows as they come, as a table that docs/performance.md can hold."""

    def __init__(self, widths: Mapping[str, int]) -> None:
        """Begin with the heading; texts go to the left of their column, numbers to the right."""
        self._widths = widths
        self.print(widths)
        print("|" + "|".join("-" * (width + 1) + ":" for width in widths.values()) + "|")

    def print(self, cells: Iterable[str]) -> None:
        padded = (cell.rjust(width) for cell, width in zip(cells, self._widths.values(), strict=True))
        print(f"| {' | '.join(padded)} |", flush=True)


def with_spread(text: str, spread: float) -> str:
    return f"{text} ({100 * spread:.1f} %)"


def comma_separated(text: str) -> list[str]:
    return text.split(",")


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every bench on ranks takes; `--rows` makes a process one of the ranks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each (default: 10)")
    parser.add_argument("--output", help="a JSON file for the rows")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    return parser


def write_rows(path: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all rows to a JSON file, if one is wanted."""
    if path:
        Path(path).write_text(json.dumps(rows, indent=2) + "\n")
