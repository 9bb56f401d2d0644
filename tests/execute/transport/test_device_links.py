"""How the accelerators of a group are connected: within a deadline, and undone as one where a rank does not come."""

import threading

import pytest
import torch
import torch.distributed as dist

from penstock.execute.transport import device_links
from penstock.execute.transport.device_links import abort_all, connect_devices
from penstock.running_time import running_s

DEADLINE_S = 0.3
SLACK_S = 2.0


class Work:
    def __init__(self, is_there=True):
        self.is_there = is_there

    def is_completed(self):
        return self.is_there

    def wait(self):
        pass

    def get_future_result(self):
        raise RuntimeError("this backend does not know it")


class Backend:
    """Posts messages as its test says; aborts end only while others run."""

    def __init__(self, post, aborts):
        self._post, self._aborts, self.posted = post, aborts, []

    def send(self, tensors, destination, tag):
        self.posted.append(("send", destination))
        return self._post()

    def recv(self, tensors, source, tag):
        self.posted.append(("recv", source))
        return self._post()

    def abort(self):
        self._aborts.wait(SLACK_S)


def connect(monkeypatch, post, rank=1, num_ranks=3):
    """Connect one rank; return its backends, and the barrier of their aborts."""
    aborts, made = threading.Barrier(2), []

    def make(*arguments):
        made.append(Backend(post, aborts))
        return made[-1]

    monkeypatch.setattr(device_links, "device_backend", make)
    return made, aborts, lambda: connect_devices(dist.HashStore(), rank, num_ranks, torch.device("cpu"), DEADLINE_S)


def test_a_number_goes_over_every_channel_of_a_rank_in_the_order_of_all(monkeypatch):
    made, _, run = connect(monkeypatch, Work)

    assert run() == made
    upward, downward = made
    assert upward.posted == [("recv", 0), ("send", 2)]
    assert downward.posted == [("send", 0), ("recv", 2)]


def never_there():
    return Work(is_there=False)


def blocks_for_ever():
    threading.Event().wait()


def fails():
    raise RuntimeError("NCCL error")


@pytest.mark.parametrize(
    ("post", "text"),
    [
        (never_there, "a first message did not come within 0.3 s"),
        (blocks_for_ever, "a rank did not connect its device within 0.3 s"),
        (fails, "NCCL error"),
    ],
)
def test_where_a_rank_does_not_come_all_is_undone_at_once_and_in_time(monkeypatch, post, text):
    _, aborts, run = connect(monkeypatch, post)
    begin_s = running_s()

    with pytest.raises(RuntimeError, match=text):
        run()

    assert running_s() - begin_s < DEADLINE_S + SLACK_S / 2
    assert not aborts.broken


class Hangs:
    def abort(self):
        blocks_for_ever()


def test_an_abort_that_does_not_come_back_is_left_behind_in_time():
    begin_s = running_s()

    abort_all([Hangs(), Hangs()], DEADLINE_S)

    assert DEADLINE_S <= running_s() - begin_s < DEADLINE_S + SLACK_S / 2
