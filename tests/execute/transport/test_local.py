"""Ranks that are threads of one process: their waits, the errors of their copies, and what they hold."""

import gc
import time
from threading import Thread
from weakref import ref

import pytest
import torch

from penstock.execute.transport import LocalTransport
from penstock.running_time import LONGEST_PART_S


@pytest.mark.slow
def test_a_message_that_comes_just_as_a_part_of_the_wait_ends_is_seen(monkeypatch):
    first, second = LocalTransport.create(2)
    parts, received = [], torch.zeros(2)

    def not_notified(part_s):
        """Time out, as a condition does that is notified after its time and before it has the lock again."""
        parts.append(part_s)
        time.sleep(part_s)
        first.post_send(1, torch.ones(2))
        return False

    monkeypatch.setattr(second._wires.changed, "wait", not_notified)
    second.wait(second.post_receive(0, received))

    assert parts == [LONGEST_PART_S]
    assert received.tolist() == [1, 1]


@pytest.mark.parametrize("comes_last", [0, 1])
def test_an_error_of_the_rank_that_copies_is_its_own(comes_last):
    ranks = LocalTransport.create(2)
    posts = [
        lambda: ranks[0].post_send(1, torch.empty(2, device="meta")),
        lambda: ranks[1].post_receive(0, torch.empty(2)),
    ]
    posts[1 - comes_last]()

    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        posts[comes_last]()


@pytest.mark.parametrize("ends_by", ["recover", "close"])
def test_no_cycle_holds_the_tensors_of_messages_that_never_moved(ends_by, monkeypatch):
    ranks = LocalTransport.create(2)
    detach, held = torch.Tensor.detach, []

    def seen(tensor):
        found = detach(tensor)
        held.append(ref(found))
        return found

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", seen)
            ranks[0].post_send(1, torch.empty(2))
        threads = [Thread(target=getattr(rank, ends_by)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if ends_by == "close":
            del ranks, threads, thread
        assert [each() for each in held] == [None]
    finally:
        gc.enable()
