"""Planted faults on four processes: whoever is left ends in time, with one error that names the culprit."""

import os
import random
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from penstock.errors import DeadlineExceeded, PeerLost
from penstock.execute.control.collectives import Control
from penstock.execute.transport import TorchTransport
from tests.support.faults import (
    DEADLINE_S,
    LONGEST_S,
    NEVER_S,
    NUM_MICROBATCHES,
    NUM_RANKS,
    Fault,
    FaultyRank,
    is_right,
)
from tests.support.ranks import RankPool

# Per pool of processes; a kill comes last, because it ends its pool.
FAULTS = [
    [("raise", "forward"), ("stop", "forward"), ("hang", "forward"), ("hang", "send"), ("kill", "forward")],
    [("raise", "backward"), ("stop", "backward"), ("hang", "backward"), ("hang", "optimizer"), ("kill", "backward")],
    [("raise", "loss"), ("stop", "send"), ("hang", "loss"), ("hang", "forward"), ("kill", "receive")],
    [("raise", "send"), ("stop", "optimizer"), ("hang", "receive"), ("hang", "backward"), ("kill", "optimizer")],
]


def plant(kinds, seed):
    choose = random.Random(seed)
    faults = []
    for kind, place in kinds:
        rank = NUM_RANKS - 1 if place == "loss" else choose.randrange(NUM_RANKS)
        faults.append(Fault(kind, rank, place, 0 if place == "optimizer" else choose.randrange(NUM_MICROBATCHES)))
    return faults


# --- on the ranks


class Peers:
    """Lets the ranks that got their error wake the one that did not, once all of them have got it, and all meet."""

    def __init__(self, transport):
        self._rank = transport.rank
        self._pids = Control(transport).all_gather_object(os.getpid())
        self._store = dist.group.WORLD.get_group_store()
        self._num_meetings = 0

    def wake_culprit(self, fault):
        """Called by every rank but the culprit; the last one that calls wakes it."""
        if fault.kind not in ("hang", "stop"):
            return
        if self._store.add(f"faults/{fault}", 1) == NUM_RANKS - 1:
            os.kill(self._pids[fault.rank], signal.SIGUSR1 if fault.kind == "hang" else signal.SIGCONT)

    def meet(self):
        """Return when all ranks have called, however long the deadline of their transport is."""
        self._num_meetings += 1
        key = f"meetings/{self._num_meetings}"
        self._store.add(key, 1)
        while self._store.add(key, 0) < NUM_RANKS:
            time.sleep(0.01)


def suffer(rank, faults, call="step"):
    """Run a step with each fault and, unless its rank is dead then, one without; return both endings of each.

    Only where a rank hangs or is stopped the others wait for the deadline.
    """
    me = FaultyRank.start_warm(DEADLINE_S)
    signal.signal(signal.SIGUSR1, me.switch.wake)
    peers = Peers(me.pipeline.transport)
    endings = []
    for fault in faults:
        peers.meet()
        me.transport.deadline_s = DEADLINE_S if fault.kind in ("hang", "stop") else NEVER_S
        ending = me.step(fault, call=call)
        if rank != fault.rank:
            peers.wake_culprit(fault)
        me.transport.deadline_s = NEVER_S
        endings.append((ending, me.step() if fault.kind != "kill" else None))
    me.pipeline.close()
    return endings


# --- judged in the test


def assert_blames(ending, fault):
    heading, own, *rest = ending.text.splitlines()
    table = rest[1 : NUM_RANKS + 2]
    assert heading.startswith(f"rank {fault.rank} is the culprit: "), ending.text
    assert fault.instruction is None or re.search(rf"\b{fault.instruction}\b", heading), ending.text
    reasons = {
        "raise": "it raised PlantedError: planted",
        "kill": "is gone",
        "stop": "is stopped",
        "hang": r"for \d+\.\d s",
    }
    assert re.search(reasons[fault.kind], heading)
    assert own.endswith(f"waited {ending.error.waited_s:.2f} s for rank {ending.error.peer}")
    assert ending.error.instruction in own
    assert ending.error.peer is not None
    # A rank that raised says all the rest itself.
    expected = [] if fault.kind == "raise" else ["rank", *map(str, range(NUM_RANKS))]
    assert [line.split()[0] for line in table] == expected
    assert isinstance(ending.error, PeerLost if fault.kind in ("raise", "kill") else (DeadlineExceeded, PeerLost))


def assert_survived(endings, fault):
    """`endings` is by rank: that of the step with the fault, that of the step after it."""
    for rank, (with_fault, _) in endings.items():
        if rank == fault.rank:
            continue
        assert with_fault.error.rank == fault.rank
        assert_blames(with_fault, fault)
    assert len({ending.text.splitlines()[0] for rank, (ending, _) in endings.items() if rank != fault.rank}) == 1
    if fault.kind != "kill":
        assert is_right([clean for _, clean in endings.values()]), fault


def told(faults, outcome):
    """Every ending, for the message of a failed test."""
    lines = [str(outcome)]
    for index, fault in enumerate(faults):
        lines.append(str(fault))
        for rank, endings in outcome.results.items():
            lines += [f"  {rank}: {e.took_s:.2f} s {e.text.splitlines()[:2]}" for e in endings[index] if e]
    return "\n".join(lines)


@pytest.mark.feature("X6")
@pytest.mark.slow
def test_twenty_planted_faults_end_in_time_with_the_right_culprit_and_the_next_step_is_right():
    planted = [plant(kinds, seed) for seed, kinds in enumerate(FAULTS)]
    pools = [RankPool(NUM_RANKS) for _ in planted]
    try:
        for pool, faults in zip(pools, planted, strict=True):
            pool.begin(suffer, faults)
        outcomes = [pool.collect(timeout_s=LONGEST_S) for pool in pools]
    finally:
        for pool in pools:
            pool.close()

    for faults, outcome in zip(planted, outcomes, strict=True):
        assert outcome.exit_codes == {faults[-1].rank: -signal.SIGKILL}, told(faults, outcome)
        assert not outcome.late
        assert not outcome.tracebacks, str(outcome)
        for index, fault in enumerate(faults):
            assert_survived({rank: endings[index] for rank, endings in outcome.results.items()}, fault)


@pytest.mark.slow
def test_a_fault_in_an_evaluation_that_is_the_very_first_step_is_found_like_any_other():
    faults = plant([("hang", "forward"), ("raise", "loss"), ("kill", "forward")], seed=5)

    with RankPool(NUM_RANKS) as pool:
        outcome = pool.attempt(suffer, faults, "evaluate", timeout_s=LONGEST_S)

    assert outcome.exit_codes == {faults[-1].rank: -signal.SIGKILL}, str(outcome)
    for index, fault in enumerate(faults):
        assert_survived({rank: endings[index] for rank, endings in outcome.results.items()}, fault)


# --- one pool of processes for the faults that nobody dies of


@pytest.fixture(scope="module")
def pool():
    with RankPool(NUM_RANKS) as processes:
        yield processes


def step_to_the_deadline(me):
    me.transport.deadline_s = DEADLINE_S
    ending = me.step()
    me.transport.deadline_s = NEVER_S
    return ending


def lose_and_swap(rank):
    me = FaultyRank.start_warm(DEADLINE_S)
    me.transport.deadline_s = NEVER_S
    me.step()  # from the second step on, messages have no headers
    me.transport.loses = 2 if rank == 1 else None
    lost = step_to_the_deadline(me)
    clean = me.step()
    me.transport.swaps = rank == 2
    swapped = step_to_the_deadline(me)
    me.pipeline.close()
    return lost, swapped, clean


@pytest.mark.slow
def test_a_lost_message_and_swapped_sends_end_in_time_with_the_cycle_of_waits(pool):
    endings = pool.run(lose_and_swap)

    for lost, swapped, _ in endings:
        for ending, cycle in ((lost, {1, 2}), (swapped, {2, 3})):
            heading = ending.text.splitlines()[0]
            assert ending.error.rank is None
            assert heading.startswith("no rank goes on: a message was lost or the orders do not match: "), ending.text
            assert {int(peer) for peer in re.findall(r"waits for rank (\d)", heading)} == cycle
    assert is_right([clean for *_, clean in endings])


def post_until_refused(transport, peer):
    """Return the error of the first post that fails, with its traceback."""
    end_s = time.monotonic() + LONGEST_S / 2
    while time.monotonic() < end_s:
        try:
            transport.post_send(peer, torch.zeros(1))
        except PeerLost as error:
            return error
    return None


def hold_an_error(rank):
    """Rank 1 leaves; rank 0 learns it when it posts and keeps the error; rank 2 waits for rank 0."""
    transport = TorchTransport(deadline_s=NEVER_S)
    Control(transport).all_gather_object("ready")
    held = None
    if rank == 0:
        held = post_until_refused(transport, 1)
    if rank == 2:
        with pytest.raises(PeerLost):
            transport.wait(transport.post_receive(0, torch.zeros(1)))
    transport.abort()
    transport.recover()
    transport.close()
    return held is not None


@pytest.mark.slow
def test_an_error_that_is_kept_does_not_keep_the_connections_open(pool):
    assert pool.run(hold_an_error) == [True, False, False, False]
