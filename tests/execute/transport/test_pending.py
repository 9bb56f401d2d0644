"""Messages in the queue of a device, told with a stand-in for it: when they are over, and what ends a wait."""

import time

import pytest
import torch

from penstock.execute.transport.pending import QueuedMessage
from penstock.execute.transport.sockets import MessageLate


class QueueStandIn:
    """A work whose message arrives after so many looks; `wait` may be called only then, since it would not block."""

    def __init__(self, num_looks, problem=None):
        self.num_looks_left = num_looks
        self.is_followed = False
        self._problem = problem

    def is_completed(self):
        self.num_looks_left -= 1
        return self.num_looks_left < 0

    def wait(self):
        assert self.num_looks_left < 0, "the current stream, not the host, would wait"
        if self._problem is not None:
            raise self._problem
        self.is_followed = True

    def get_future_result(self):
        raise RuntimeError("this backend does not know it")


def message(work):
    return QueuedMessage(work, torch.zeros(1))


def test_a_message_on_its_way_is_not_over_and_blocks_nobody():
    work = QueueStandIn(1)

    assert not message(work).is_over()
    assert message(work).is_over()
    assert work.is_followed


def test_the_host_waits_until_the_message_is_there_and_the_stream_goes_on_behind_it():
    work = QueueStandIn(5)

    message(work).wait(20.0)

    assert work.is_followed


def test_a_message_that_does_not_come_ends_the_wait_at_the_deadline():
    begin_s = time.monotonic()

    with pytest.raises(MessageLate):
        message(QueueStandIn(10**9)).wait(0.02)

    assert time.monotonic() - begin_s >= 0.02


def test_what_went_wrong_with_a_message_is_raised_where_it_is_waited_for():
    with pytest.raises(RuntimeError, match="remote process exited"):
        message(QueueStandIn(2, RuntimeError("NCCL: remote process exited"))).wait(20.0)


class Message:
    """A message that has ended, well or not, or of a backend that does not tell."""

    def __init__(self, has_failed):
        self.has_failed, self.calls = has_failed, []

    def is_completed(self):
        return True

    def get_future_result(self):
        if self.has_failed is None:
            raise RuntimeError("this backend does not know it")
        future = torch.futures.Future()
        if self.has_failed:
            future.set_result(2)
        return future

    def wait(self):
        self.calls.append("wait")

    def block_current_stream(self):
        self.calls.append("block_current_stream")


@pytest.mark.parametrize(("has_failed", "calls"), [(False, ["block_current_stream"]), (None, ["wait"])])
def test_behind_a_message_that_has_ended_well_the_stream_goes_on(has_failed, calls):
    message = Message(has_failed)

    QueuedMessage(message, torch.zeros(1)).is_over()

    assert message.calls == calls


def test_of_a_message_that_has_failed_no_wait_aborts_its_backend_alone():
    message = Message(True)

    with pytest.raises(RuntimeError, match="NCCL has lost the connection"):
        QueuedMessage(message, torch.zeros(1)).is_over()

    assert message.calls == []
