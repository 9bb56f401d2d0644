"""Waiting for a device ends when it has come to the place, or at the deadline."""

import pytest

from penstock.errors import DeadlineExceeded
from penstock.execute.observing.device_events import await_marker


class MarkerStandIn:
    """Reached after so many looks."""

    def __init__(self, num_looks):
        self.num_looks_left = num_looks

    def query(self):
        self.num_looks_left -= 1
        return self.num_looks_left < 0


def test_the_wait_ends_when_the_device_has_come_there():
    marker = MarkerStandIn(3)

    await_marker(marker, rank=0, deadline_s=20.0)

    assert marker.num_looks_left == -1


def test_a_device_that_stands_still_ends_the_wait_at_the_deadline():
    with pytest.raises(DeadlineExceeded, match=r"rank 2: waited .* for its device .* the deadline is 0.01 s") as caught:
        await_marker(MarkerStandIn(10**9), rank=2, deadline_s=0.01)

    assert caught.value.rank == 2
    assert caught.value.waited_s > 0.01
