"""Backends, told with stand-ins for them: when a message is over, what ends a wait, and how accelerators connect."""

import math
import threading
import time
from contextlib import nullcontext
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from penstock.execute.transport import backend_links
from penstock.execute.transport.backend_links import (
    DOWNWARD,
    UPWARD,
    BackendLink,
    GlooWaiter,
    QueuedMessage,
    abort_all,
    connect_devices,
)
from penstock.execute.transport.links import MessageLate
from penstock.execute.transport.protocol import Tag
from penstock.running_time import running_s

DEADLINE_S = 0.3
SLACK_S = 30.0


class Work:
    """A message of an accelerator that is there after so many looks, or when its test says so.

    Then it has ended well, or has failed; of `None` the backend does not tell, and its wait raises the problem.
    """

    def __init__(self, num_looks=math.inf, *, has_failed=None, problem=None):
        self.num_looks, self.has_failed, self.problem = num_looks, has_failed, problem
        self.is_there = False
        self.calls = []

    def is_completed(self):
        self.num_looks -= 1
        self.is_there = self.is_there or self.num_looks < 0
        return self.is_there

    def get_future_result(self):
        if self.has_failed is None:
            raise RuntimeError("this backend does not know it")
        future = torch.futures.Future()
        if self.has_failed:
            future.set_result(2)
        return future

    def wait(self):
        self.calls.append("wait")
        if self.is_there and self.problem is not None:
            raise self.problem

    def block_current_stream(self):
        self.calls.append("block_current_stream")


def message(work):
    return QueuedMessage(work, torch.zeros(1))


def test_a_message_on_its_way_blocks_nobody_but_a_host_that_waits_until_it_is_there():
    work, awaited = Work(1), Work(5)

    assert not message(work).is_over()
    assert work.calls == []
    assert message(work).is_over()
    message(awaited).wait(20.0)
    assert (work.calls, awaited.calls, awaited.num_looks) == (["wait"], ["wait"], -1)


def test_a_message_that_does_not_come_or_fails_ends_the_wait_at_the_deadline_or_at_once():
    begin_s = time.monotonic()

    with pytest.raises(MessageLate):
        message(Work()).wait(0.02)

    assert time.monotonic() - begin_s >= 0.02
    with pytest.raises(RuntimeError, match="remote process exited"):
        message(Work(2, problem=RuntimeError("NCCL: remote process exited"))).wait(20.0)


@pytest.mark.parametrize(
    ("has_failed", "calls"),
    [(False, ["block_current_stream"]), (None, ["wait"]), (True, [])],
    ids=["well", "not told", "failed"],
)
def test_behind_a_message_that_has_ended_well_the_stream_goes_on_and_no_wait_aborts_a_backend_alone(has_failed, calls):
    work = Work(0, has_failed=has_failed)

    with pytest.raises(RuntimeError, match="NCCL has lost the connection") if has_failed else nullcontext():
        message(work).is_over()

    assert work.calls == calls


class Grouping:
    """NCCL 2.28: a call to a lost peer raises and leaves a group open, in which no later call does anything."""

    is_open = False

    def _post(self, peer):
        if peer == 0:
            Grouping.is_open = True
            raise RuntimeError("ncclRemoteError")
        return "never begins" if self.is_open else "begins"

    def send(self, tensors, destination, tag):
        return self._post(destination)

    def recv(self, tensors, source, tag):
        return self._post(source)

    def _group_end(self):
        was_open, Grouping.is_open = Grouping.is_open, False
        raise RuntimeError("ncclRemoteError" if was_open else "ncclInvalidUsage")


@pytest.mark.parametrize("fail", [BackendLink.send, BackendLink.receive])
def test_after_a_call_that_raised_later_ones_begin(fail):
    lost, other = (BackendLink(peer, Tag.DATA, Grouping(), Grouping(), lambda work, tensor: work) for peer in (0, 1))

    with pytest.raises(RuntimeError, match="ncclRemoteError"):
        fail(lost, torch.zeros(3))

    assert other.send(torch.zeros(3)) == other.receive(torch.zeros(3)) == "begins"


def test_each_direction_of_a_link_has_a_backend_of_its_own():
    up, down, tensor = Mock(), Mock(), torch.zeros(1)
    link = BackendLink(2, Tag.DATA, up, down, lambda work, tensor: (work, tensor.shape))

    assert link.send(tensor) == (up.send.return_value, (1,))
    assert link.receive(tensor) == (down.recv.return_value, (1,))
    assert up.mock_calls == [call.send([tensor], 2, Tag.DATA)]
    assert down.mock_calls == [call.recv([tensor], 2, Tag.DATA)]


class GlooStandIn:
    """A work that has ended, well or with a problem."""

    def __init__(self, problem=None):
        self.problem, self.waited_by = problem, None

    def wait(self, limit):
        self.waited_by = threading.current_thread().name
        if self.problem is not None:
            raise self.problem


def test_the_main_thread_waits_for_gloo_through_another_one_which_serves_again():
    waiter, works = GlooWaiter(), [GlooStandIn(), GlooStandIn(RuntimeError("Timed out"))]

    waiter.message(works[0], torch.zeros(1)).wait(SLACK_S)
    with pytest.raises(RuntimeError, match="Timed out"):
        waiter.message(works[1], torch.zeros(1)).wait(SLACK_S)

    assert [work.waited_by for work in works] == ["penstock: waits for gloo"] * 2


def waiting():
    return {thread for thread in threading.enumerate() if thread.name == "penstock: waits for gloo"}


@pytest.mark.parametrize("drop", [GlooWaiter.close, lambda waiter: None], ids=["closed", "dropped"])
def test_the_thread_ends_with_its_waiter(drop):
    before = waiting()  # those of earlier tests may end meanwhile
    waiter = GlooWaiter()
    waiter.message(GlooStandIn(), torch.zeros(1)).wait(SLACK_S)
    assert len(waiting() - before) == 1

    drop(waiter)
    del waiter

    end_s = time.monotonic() + SLACK_S
    while waiting() - before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert waiting() - before == set()


def connect(monkeypatch, post, rank=1, num_ranks=3, names=(UPWARD, DOWNWARD)):
    """Connect one rank by backends whose aborts end only while others run; return them, and the barrier of aborts."""
    aborts, made = threading.Barrier(2), []

    def make(*arguments):
        calls = {name: Mock(side_effect=post) for name in ("send", "recv", "allreduce")}
        made.append(Mock(**calls, abort=lambda: aborts.wait(SLACK_S)))
        return made[-1]

    monkeypatch.setattr(backend_links, "device_backend", make)
    where = dist.HashStore(), rank, num_ranks, torch.device("cpu"), DEADLINE_S
    return made, aborts, lambda: connect_devices(*where, names)


def test_a_number_goes_over_every_channel_of_a_rank_in_the_order_of_all(monkeypatch):
    made, _, run = connect(monkeypatch, lambda *_: Work(0))

    assert run() == made
    upward, downward = ([(name, peer) for name, (_, peer, _), _ in backend.mock_calls] for backend in made)
    assert upward == [("recv", 0), ("send", 2)]
    assert downward == [("send", 0), ("recv", 2)]


def test_what_all_ranks_begin_together_is_connected_by_a_sum(monkeypatch):
    made, _, run = connect(monkeypatch, lambda *_: Work(0), names=("messages", "sums"))

    assert run() == made
    assert [[name for name, _, _ in backend.mock_calls] for backend in made] == [["allreduce"], ["allreduce"]]


def blocks_for_ever(*_):
    threading.Event().wait()


@pytest.mark.parametrize(
    ("post", "text"),
    [
        (lambda *_: Work(), "a first message did not come within 0.3 s"),
        (blocks_for_ever, "a rank did not connect its device within 0.3 s"),
        (RuntimeError("NCCL error"), "NCCL error"),
    ],
)
def test_where_a_rank_does_not_come_all_is_undone_at_once_and_in_time(monkeypatch, post, text):
    _, aborts, run = connect(monkeypatch, post)
    begin_s = running_s()

    with pytest.raises(RuntimeError, match=text):
        run()

    assert running_s() - begin_s < DEADLINE_S + SLACK_S / 2
    assert not aborts.broken


def test_an_abort_that_does_not_come_back_is_left_behind_in_time():
    begin_s = running_s()

    abort_all([Mock(abort=blocks_for_ever)] * 2, DEADLINE_S)

    assert DEADLINE_S <= running_s() - begin_s < DEADLINE_S + SLACK_S / 2
