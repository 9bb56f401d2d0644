"""Rank processes for tests: started quickly, bounded in time, gone afterwards.

`run_ranks(2, fn, ...)` calls `fn(rank, ...)` in two processes whose default group of torch.distributed is ready, and
returns both results. `RankPool` keeps the processes for many calls. `run_ranks_with_deaths` is for ranks that die on
purpose. `fn` and its arguments and results travel by pickle, so `fn` is a function at the top of its module.

Every rank is a fork of a server process (forks.py), which takes milliseconds instead of seconds. The store lives in the
test's own process, on 127.0.0.1, so that it outlives any rank; nothing is written to disk.
"""

import os
import pickle
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.forks import forks

LONGEST_END_S = 5.0
MOST_POLLING = 6
"""Of the threads of a rank that serves one more call: each group of gloo that a function has made leaves one."""


LONGEST_S = 240.0
"""How long ranks may take for one function; with layers to compile, a busy machine needs minutes."""


class RanksFailed(Exception):
    """A rank raised, died or did not end in time."""


@dataclass
class Outcome:
    """What became of every rank; a rank is a key only where it applies."""

    results: dict = field(default_factory=dict)
    tracebacks: dict = field(default_factory=dict)
    exit_codes: dict = field(default_factory=dict)
    """Of the ranks that died; a signal is negative."""
    late: list = field(default_factory=list)

    def has_failed(self):
        return bool(self.tracebacks or self.exit_codes or self.late)

    def __str__(self):
        lines = [f"rank {rank} raised:\n{text}" for rank, text in sorted(self.tracebacks.items())]
        lines += [f"rank {rank} died with exit code {code}" for rank, code in sorted(self.exit_codes.items())]
        lines += [f"rank {rank} did not end in time" for rank in self.late]
        return "\n".join(lines)


class RankPool:
    """Processes that run one function after another, with one default group for all of them."""

    def __init__(self, num_ranks, *, backend="gloo", prepare=None):
        """`prepare(rank)` runs in every process before it has a default group."""
        self.num_ranks = num_ranks
        self.backend = backend
        self.prepare = prepare
        self.processes = []
        self._connections = []
        self._store = None
        self._is_busy = False
        self._are_spent = False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def run(self, fn, *args, timeout_s=LONGEST_S):
        """Return every rank's result; on a failure end all ranks and raise RanksFailed; a later call restarts them."""
        outcome = self.attempt(fn, *args, timeout_s=timeout_s)
        if outcome.has_failed():
            self.close()
            raise RanksFailed(f"{fn.__name__} on {self.num_ranks} ranks:\n{outcome}")
        return [outcome.results[rank] for rank in range(self.num_ranks)]

    def attempt(self, fn, *args, timeout_s=LONGEST_S):
        """Run and tell what became of every rank, deaths included."""
        self.begin(fn, *args)
        return self.collect(timeout_s=timeout_s)

    def begin(self, fn, *args):
        """Start the function on all ranks; `processes[rank].pid` may be signalled until `collect`."""
        if not self.processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((fn, args)))
        self._is_busy = True

    def collect(self, *, timeout_s=LONGEST_S):
        """Wait for all ranks, at most so long; ranks that are late are killed with the whole pool."""
        end_s = time.monotonic() + timeout_s
        outcome = Outcome()
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        while ranks and time.monotonic() < end_s:
            for connection in wait_for_any(list(ranks), timeout=max(end_s - time.monotonic(), 0)):
                self._take(connection, ranks.pop(connection), outcome)
        outcome.late = sorted(ranks.values())
        self._is_busy = bool(ranks)
        if outcome.late or outcome.exit_codes or self._are_spent:
            self.close()
        return outcome

    def close(self):
        """End every process; those that do not follow are killed, stopped ones too."""
        for connection in self._connections:
            connection.close()  # the ranks read this as the end of work
        end_s = time.monotonic() + (0.0 if self._is_busy else LONGEST_END_S)
        for process in self.processes:
            process.join(max(end_s - time.monotonic(), 0))
            process.kill()
            process.join()
            process.close()
        self.processes, self._connections, self._store, self._are_spent = [], [], None, False

    def _take(self, connection, rank, outcome):
        try:
            is_fine, answer, num_polling = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.processes[rank].join(LONGEST_END_S)
            outcome.exit_codes[rank] = self.processes[rank].exitcode
        else:
            (outcome.results if is_fine else outcome.tracebacks)[rank] = answer
            self._are_spent |= num_polling > MOST_POLLING

    def _start(self):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OMP_NUM_THREADS", "1")
            context = forks()
            for rank in range(self.num_ranks):
                ours, theirs = context.Pipe()
                given = (theirs, rank, self.num_ranks, port, self.backend, self.prepare)
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self._connections.append(ours)


def run_ranks(num_ranks, fn, *args, timeout_s=LONGEST_S, backend="gloo"):
    """Call `fn(rank, *args)` on fresh processes and return the results, or raise RanksFailed with all tracebacks."""
    with RankPool(num_ranks, backend=backend) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


def run_ranks_with_deaths(num_ranks, fn, *args, timeout_s=LONGEST_S):
    """Call `fn(rank, *args)` on fresh processes and return the Outcome, whatever becomes of the ranks."""
    with RankPool(num_ranks) as pool:
        return pool.attempt(fn, *args, timeout_s=timeout_s)


def _serve(connection, rank, num_ranks, port, backend, prepare):
    """Be one rank: run what comes until the other end closes."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    if prepare is not None:
        prepare(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    while True:
        try:
            fn, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        connection.send_bytes(_answer(fn, rank, args))
    os._exit(0)  # a group that lost a peer may block in its destructor


def _answer(fn, rank, args):
    try:
        return pickle.dumps((True, fn(rank, *args), _num_polling()))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc(), _num_polling()))


def _num_polling():
    names = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended since
            names.append(Path(f"/proc/self/task/{thread}/comm").read_text())
    return names.count("gloo_tcp_loop\n")
