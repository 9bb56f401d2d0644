"""Measure one model in torch.distributed.pipelining, Megatron-core, DeepSpeed and Penstock: time, memory, host time.

    python bench/peers.py [--cases emulated-4,decoder-2] [--only torch] [--rounds N] [--output FILE.json]

Eight blocks are trained by p ranks over gloo on the CPU, a thread each: forward, backward, and a step of SGD. A case is
a size of the blocks on p ranks:

    emulated-p    a rank sleeps 10 ms in forward and 20 ms in backward per microbatch, so that there is room for every
                  rank, whatever machine this is
    decoder-p     decoder blocks of width 256 on 128 tokens; decoder-4 has its memory counted, its time is not measured
    tiny-p        each block is Linear(64, 64) and tanh, 64 microbatches: messages and the runtime take the time

Every system has processes of its own, which wait while others run. They take turns at whole steps, in random order in
every round, and are scheduled in real time where that is allowed. A step lasts from when all its ranks were there until
the last one is done; a ratio is the median over the rounds of a system's step over that of Penstock's 1F1B. Memory is
the peak of tensor bytes in the second step beyond weights and batch, on the rank that has most, counted by torch's
profiler. Host time is what the processor worked on a rank per forward or backward of a microbatch, in user and system
mode, on all threads. The losses of all steps are compared with those of one process without a pipeline: they agree only
if the gradients did. Systems that are not installed are listed with what installs them.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from typing import Any

from memory import QUIET
from on_ranks import REST_S, SEED, Table, comma_separated, paired_ratio, spread_of, with_spread, write_rows
from peer_cases import CASES, Case
from peer_rank import RankSpec, StepTime, run_rank

NUM_WARM_UP_ROUNDS = 2
TOLERANCE = 1e-5
"""Of losses, relative."""
DEADLINE_S = 300.0
MIB = 2**20
INSTALL = 'pip install -c constraints.txt ".[bench]"'
REFERENCE, BASE = ("one process", "no pipeline"), ("Penstock", "1f1b")
ENTRIES = [
    REFERENCE,
    ("torch", "1f1b"),
    ("Megatron-core", "1f1b"),
    ("DeepSpeed", "1f1b"),
    BASE,
    ("Megatron-core", "interleaved-1f1b"),
    ("Penstock", "interleaved-1f1b"),
    ("torch", "zbv"),
    ("Penstock", "zbv"),
]
"""Systems, and the schedules that they are measured with; of one name, their order of work is the same."""
MODULES = {"torch": "torch", "Megatron-core": "megatron.core", "DeepSpeed": "deepspeed"}
DISTRIBUTIONS = {"torch": "torch", "Megatron-core": "megatron-core", "DeepSpeed": "deepspeed"}
COLUMNS = {"case": 10, "system": 13, "schedule": 16, "step, ms": 16, "ratio": 6, "peak, MiB": 9, "host, us": 8}
COLUMNS |= {"losses": 9}
SUMMARY = {"emulated-4": "step, ms", "decoder-2": "step, ms", "decoder-4": "peak, MiB", "tiny-2": "host, us"}
"""The column that the summary shows of a case."""


@dataclass
class Row:
    """What was measured of one system in one case."""

    case: str
    system: str
    family: str
    problem: str = ""
    """Why nothing was measured; empty where it was."""
    step_s: float = 0.0
    """The median; 0 where time is not measured, as all times here."""
    spread: float = 0.0
    """The middle half of the steps, as a share of the median."""
    ratio: float = 0.0
    """Over Penstock's 1F1B; 0 where that was not measured."""
    peak_bytes: int = 0
    host_s: float = 0.0
    """Of the processor, per forward or backward of a microbatch, on the rank that worked most."""
    losses: str = ""
    """Whether they are those of one process."""


Entry = tuple[str, str]
Rounds = list[list[StepTime]]
"""Per round, the time of every rank."""


class Ranks:
    """The processes of one system."""

    def __init__(self, entry: Entry, case: Case) -> None:
        """Start them; they live until `end`."""
        num_ranks, port = 1 if entry == REFERENCE else case.num_ranks, free_port()
        context = multiprocessing.get_context("fork")  # what all of them import is there already
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._connections = [near for near, _ in pipes]
        self._processes = []
        for rank, (_, far) in enumerate(pipes):
            spec = RankSpec(*entry, case.name, rank, num_ranks, port)
            self._processes.append(context.Process(target=run_rank, args=(spec, far), daemon=True))
            self._processes[-1].start()
            far.close()

    def ask(self, command: str) -> list[Any]:
        """Send a command to every rank and return their results.

        Raises:
            RuntimeError: with the text of the first failure.
        """
        for connection in self._connections:
            connection.send(command)
        return self.results()

    def results(self) -> list[Any]:
        """Wait for one result of every rank."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        found: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), DEADLINE_S)
            if not ready:
                raise RuntimeError(f"ranks {sorted(waiting.values())} sent no result within {DEADLINE_S:.0f} s")
            for connection in ready:
                rank = waiting.pop(connection)
                found[rank] = connection.recv()
                if isinstance(found[rank], RuntimeError):
                    raise found[rank]
        return [found[rank] for rank in sorted(found)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_installed(system: str) -> bool:
    try:
        return importlib.util.find_spec(MODULES.get(system, "penstock")) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def measure(case: Case, entries: Sequence[Entry], num_rounds: int) -> list[Row]:
    """Measure all systems in turn."""
    rows = {entry: Row(case.name, *entry) for entry in entries}
    running: dict[Entry, Ranks] = {}
    with contextlib.ExitStack() as stack:
        for entry, row in rows.items():
            if not is_installed(entry[0]):
                row.problem = f"not installed; {INSTALL}"
                continue
            ranks = Ranks(entry, case)
            stack.callback(ranks.end)
            with noted(row):
                ranks.results()  # each is ready
                row.peak_bytes = max(ranks.ask("count"))
                running[entry] = ranks
        steps = take_turns(rows, running, num_rounds) if case.is_timed else {}
        losses = {entry: losses_of(ranks) for entry, ranks in running.items()}
    for entry, rounds in steps.items():
        add_times(rows[entry], case, rounds, steps.get(BASE))
    for entry, found in losses.items():
        rows[entry].losses = compared(found, losses.get(REFERENCE))
    return list(rows.values())


@contextlib.contextmanager
def noted(row: Row) -> Iterator[None]:
    """Keep the reason of a failure as the row's result."""
    try:
        yield
    except (RuntimeError, EOFError) as error:
        reasons = re.findall(r"^\w*Error: .+", str(error), re.MULTILINE)
        row.problem = reasons[-1] if reasons else str(error) or "a rank ended"
        print(f"{row.system}, {row.family}: {error}", file=sys.stderr)


def take_turns(rows: dict[Entry, Row], running: dict[Entry, Ranks], num_rounds: int) -> dict[Entry, Rounds]:
    """Run steps in random order; a system that fails is left out from then on."""
    chance, found = random.Random(SEED), {entry: Rounds() for entry in running}
    for ranks in running.values():
        ranks.ask("prefer")
    for _ in range(NUM_WARM_UP_ROUNDS + num_rounds):
        order = list(running)
        chance.shuffle(order)
        for entry in order:
            time.sleep(REST_S)
            with noted(rows[entry]):
                found[entry].append(running[entry].ask("step"))
            if rows[entry].problem:
                del running[entry], found[entry]
    return {entry: rounds[NUM_WARM_UP_ROUNDS:] for entry, rounds in found.items()}


def losses_of(ranks: Ranks) -> list[float]:
    """Return the loss of every step, as a rank has it that knows it."""
    return next(losses for losses in ranks.ask("losses") if losses[0] is not None)


def add_times(row: Row, case: Case, rounds: Rounds, base: Rounds | None) -> None:
    seconds = seconds_of(rounds)
    row.step_s, row.spread = statistics.median(seconds), spread_of(seconds)
    row.ratio = paired_ratio(seconds, seconds_of(base)) if base else 0.0
    processor_s = statistics.median(max(each.processor_s for each in ranks) for ranks in rounds)
    row.host_s = processor_s / (2 * case.num_microbatches)


def seconds_of(rounds: Rounds) -> list[float]:
    return [max(each.end_s for each in ranks) - max(each.begin_s for each in ranks) for ranks in rounds]


def compared(losses: list[float], expected: list[float] | None) -> str:
    if expected is None:
        return "unknown"
    worst = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
    return "same" if worst <= TOLERANCE else f"off {worst:.0e}"


def cells_of(row: Row) -> dict[str, str]:
    cells = {"case": row.case, "system": row.system, "schedule": row.family, "losses": row.losses}
    if row.problem:
        return cells | {"step, ms": row.problem}
    if row.step_s:
        cells |= {"step, ms": with_spread(f"{1e3 * row.step_s:.1f}", row.spread), "host, us": f"{1e6 * row.host_s:.0f}"}
    ratio = f"{row.ratio:.2f}" if row.ratio else ""
    return cells | {"peak, MiB": f"{row.peak_bytes / MIB:.1f}", "ratio": ratio}


def print_summary(rows: Sequence[Row]) -> None:
    """Print one line per system and schedule: the figure that each case is for."""
    found = {(row.system, row.family, row.case): cells_of(row) for row in rows}
    cases = [case for case in SUMMARY if any(row.case == case for row in rows)]
    print()
    table = Table({"system": 13, "schedule": 16} | {f"{case}: {SUMMARY[case]}": 21 for case in cases})
    for entry in dict.fromkeys((row.system, row.family) for row in rows):
        table.print([*entry, *(found[*entry, case].get(SUMMARY[case], "") for case in cases)])


def versions() -> dict[str, str]:
    return {system: importlib.metadata.version(name) for system, name in DISTRIBUTIONS.items() if is_installed(system)}


def main() -> int:
    """Print one line per case and system; return 1 when one failed or has other losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=comma_separated, default=list(SUMMARY), help=f"of {', '.join(CASES)}")
    parser.add_argument("--only", type=comma_separated, help="systems to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each (default: 10)")
    parser.add_argument("--output", help="a JSON file for the rows")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; expected some of {', '.join(CASES)}")
    if unknown := [name for name in arguments.only or [] if name not in dict(ENTRIES)]:
        parser.error(f"unknown system {unknown[0]!r}; expected some of {', '.join(dict(ENTRIES))}")
    if arguments.rounds < 2:
        parser.error(f"--rounds: expected at least 2, got {arguments.rounds}")
    os.environ["KINETO_LOG_LEVEL"] = QUIET
    entries = [entry for entry in ENTRIES if not arguments.only or entry[0] in arguments.only or entry == REFERENCE]
    load = os.getloadavg()[0]
    print(", ".join(f"{system} {version}" for system, version in versions().items()))
    print(f"medians of {arguments.rounds} steps (and their middle half)\n")
    table, rows = Table(COLUMNS), list[Row]()
    for name in arguments.cases:
        found = measure(CASES[name], entries, arguments.rounds)
        for row in found:
            cells = cells_of(row)
            table.print([cells.get(column, "") for column in COLUMNS])
        rows += found
    print_summary(rows)
    print(f"\nload of this machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    head = {"versions": versions(), "load": [load, os.getloadavg()[0]], "cores": os.cpu_count()}
    write_rows(arguments.output, [head, *(asdict(row) for row in rows)])
    failed = [row for row in rows if row.problem and not row.problem.startswith("not installed")]
    return int(bool(failed) or any(row.losses not in ("", "same") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
