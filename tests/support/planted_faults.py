"""Plants faults at random ranks, steps and instructions of four processes, and judges how every other rank ends.

    python -m tests.support.planted_faults --cases 40 --seed 0

Each rank that is left must end within the deadline and 2 s, with an error that blames the right rank (of a message that
was lost or swapped: both its ends). Unless a process died, the next step must be right. Afterwards no file, no name of
shared memory or of a socket, no open file, no thread and no process may be left. Seed and number name a case.
"""

import argparse
import contextlib
import gc
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.transport import TorchTransport, torch_dist
from tests.support.faults import NUM_MICROBATCHES, NUM_RANKS, Ending, Fault, FaultyRank, is_right
from tests.support.ranks import RankPool

KINDS = ("raise", "kill", "hang", "stop", "shape", "lose", "swap", "batch", "connect")
PLACES = ("forward", "backward", "send", "receive", "optimizer", "loss")
ALLOWED_S = 2.0
LONGEST_S = 300.0


@dataclass(frozen=True)
class Case:
    """One fault, and when it strikes."""

    number: int
    fault: Fault
    num_clean: int
    """Steps before it, all right."""
    peer: int | None = None
    """The other end of a message that is lost or swapped."""

    @classmethod
    def drawn(cls, number, seed):
        chance = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)] if number < len(KINDS) else chance.choice(KINDS)
        place = chance.choice(PLACES) if kind in ("raise", "kill", "hang", "stop") else "forward"
        rank, peer = chance.randrange(NUM_RANKS), None
        if place == "loss":
            rank = NUM_RANKS - 1
        if kind == "swap":
            rank = chance.randrange(1, NUM_RANKS - 1)
            peer = rank + 1
        if kind == "lose":
            peer = chance.choice([other for other in (rank - 1, rank + 1) if 0 <= other < NUM_RANKS])
        call = 0 if place == "optimizer" else chance.randrange(NUM_MICROBATCHES)
        # Before the second step the ranks do not know each other's shapes, and headers travel with the messages.
        num_clean = chance.randrange(1 if kind in ("shape", "lose", "swap") else 0, 3)
        return cls(number, Fault(kind, rank, place, call), num_clean, peer)

    @property
    def is_deadly(self):
        return self.fault.kind in ("kill", "connect")


# --- on the ranks


def suffer(rank, cases, deadline_s, folder):
    """Run the cases one after another, the last of which may end this process; return what became of each."""
    tempfile.tempdir = folder
    first = FaultyRank.start(TorchTransport(deadline_s=LONGEST_S))
    first.step()  # imports what a first step imports
    first.pipeline.close()
    del first
    gc.collect()
    before = held()
    found = []
    for case in cases:
        if case.fault.kind == "connect":
            found.append((connect_without(case, deadline_s), None))
            continue
        me = FaultyRank.start(TorchTransport(deadline_s=deadline_s))
        pids = Control(me.pipeline.transport).all_gather_object(os.getpid())
        signal.signal(signal.SIGUSR1, me.switch.wake)
        clean = [me.step() for _ in range(case.num_clean)]
        assert all(ending.error is None for ending in clean), [ending.text for ending in clean]
        ending = strike(me, case)
        wake(case, rank, pids)
        found.append((ending, None if case.is_deadly else me.step()))
        me.pipeline.close()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        del me, clean
    gc.collect()
    return found, before, held()


def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def strike(me, case):
    """Run the step in which the fault strikes."""
    fault, is_mine = case.fault, me.pipeline.rank == case.fault.rank
    if is_mine and fault.kind == "lose":
        me.transport.loses = case.peer
    if is_mine and fault.kind == "swap":
        me.transport.swaps = True
    is_switched = fault.kind in ("raise", "kill", "hang", "stop", "shape")
    ending = me.step(fault if is_switched else None, narrow=is_mine and fault.kind == "batch")
    me.transport.stop_meddling()
    return ending


def wake(case, rank, pids):
    """Called by every rank; the last one but the culprit wakes it, once all others have their error."""
    fault = case.fault
    if fault.kind not in ("hang", "stop") or rank == fault.rank:
        return
    if dist.group.WORLD.get_group_store().add(f"faults/{case.number}", 1) == NUM_RANKS - 1:
        os.kill(pids[fault.rank], signal.SIGUSR1 if fault.kind == "hang" else signal.SIGCONT)


def connect_without(case, deadline_s):
    """Make a pipeline, while one rank is killed after it has begun to listen."""
    begin_s = time.monotonic()
    if dist.get_rank() == case.fault.rank:
        torch_dist.connect_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        FaultyRank.start(TorchTransport(deadline_s=deadline_s))
    except PipelineError as error:
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return Ending(time.monotonic() - begin_s, error)
    return Ending(time.monotonic() - begin_s)


# --- judged here


def judge(case, rank, ending, deadline_s):
    """Return what is wrong with how one rank ended; empty if nothing is."""
    if ending.error is None:
        return "it ended without an error"
    if ending.took_s > deadline_s + ALLOWED_S:
        return f"it took {ending.took_s:.2f} s"
    heading = ending.text.splitlines()[0]
    if case.peer is not None:
        cycle = {int(number) for number in re.findall(r"rank (\d)", heading)}
        return "" if "no rank goes on" in heading and {case.fault.rank, case.peer} <= cycle else heading
    return "" if ending.error.rank == case.fault.rank else f"it blames rank {ending.error.rank}: {heading}"


def problems_of(cases, outcome, deadline_s):
    dead = {case.fault.rank for case in cases if case.is_deadly}
    if outcome.exit_codes != dict.fromkeys(dead, -signal.SIGKILL) or outcome.late or outcome.tracebacks:
        yield None, str(outcome)
        return
    for index, case in enumerate(cases):
        endings = {rank: found[index] for rank, (found, _, _) in outcome.results.items()}
        for rank, (ending, _) in endings.items():
            told = "" if rank == case.fault.rank else judge(case, rank, ending, deadline_s)
            if told:
                yield case, f"rank {rank}: {told}"
        if not case.is_deadly and not is_right([after for _, after in endings.values()]):
            yield case, "the step after it is wrong"
    for rank, (_, before, after) in outcome.results.items():
        if any(map(int.__gt__, after, before)):
            yield None, f"rank {rank}: {after} open files and threads, {before} before"


def names_outside():
    """Names of shared memory and of sockets that a process of Penstock or torch may leave on this machine."""
    sockets = Path("/proc/net/unix").read_text().split()
    memory = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in (*sockets, *memory) if "penstock" in name or name.startswith("torch_")}


def left_behind(pids, before, folder, max_wait_s=10.0):
    """Return what is still there; names of other programs may come and go meanwhile."""
    end_s = time.monotonic() + max_wait_s
    while (names := names_outside() - before) and time.monotonic() < end_s:
        time.sleep(0.1)
        before |= names_outside() - names
    files = [os.path.join(folder, name) for name in os.listdir(folder)]
    return [*sorted(names), *files, *(f"process {pid}" for pid in pids if os.path.exists(f"/proc/{pid}"))]


def batches_of(cases):
    """Cases that one set of processes can suffer: up to one that a process dies of."""
    batch = []
    for case in cases:
        batch.append(case)
        if case.is_deadly or len(batch) == 8:
            yield batch
            batch = []
    if batch:
        yield batch


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds; more on a busy machine (default: 2)")
    words = parser.parse_args(arguments)
    num_wrong = 0
    for cases in batches_of([Case.drawn(number, words.seed) for number in range(words.cases)]):
        before = names_outside()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            with RankPool(NUM_RANKS) as pool:
                pool.begin(suffer, cases, words.deadline, folder)
                pids = [process.pid for process in pool.processes]
                outcome = pool.collect(timeout_s=LONGEST_S)
            problems = list(problems_of(cases, outcome, words.deadline))
            problems += [(None, f"left behind: {name}") for name in left_behind(pids, before, folder)]
        for case in cases:
            took_s = max((found[cases.index(case)][0].took_s for found, _, _ in outcome.results.values()), default=0.0)
            wrong = [told for other, told in problems if other in (case, None)]
            num_wrong += bool(wrong)
            print(f"{case.number:3} {case}: {took_s:.2f} s {'; '.join(wrong) or 'right'}", flush=True)
    print(f"{words.cases - num_wrong} of {words.cases} right")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
