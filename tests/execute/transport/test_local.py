"""Ranks that are threads of one process: their waits."""

import time

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
