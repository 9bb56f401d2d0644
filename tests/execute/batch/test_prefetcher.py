"""The data of one step come when they are needed and go after their last use."""

import pytest

from penstock.execute.batch.microbatch import Microbatch, without_data
from penstock.execute.batch.prefetcher import Prefetcher
from penstock.execute.batch.reader import DataTimes
from penstock.ir.timeline import DataWait


class Endless:
    times = DataTimes()
    waits = (DataWait(0, 1, 0.5, 0.75),)

    def next(self, index):
        whole = Microbatch(index, (f"data {index}",), {}, None, 2)
        return whole, [whole]


def test_what_is_let_go_keeps_its_number_and_its_size():
    slices = [[Microbatch(0, ("x",), {"mask": 1}, "y", 2, 0, 5), Microbatch(0, ("x",), {}, "y", 2, 1, 4)]]

    Prefetcher(slices).release(0)

    assert slices == [[Microbatch(0, (), {}, None, 2, 0, 5), Microbatch(0, (), {}, None, 2, 1, 4)]]
    assert without_data(slices[0][0]) == slices[0][0]


class Copies:
    """Notes what is copied, and calls its copy by the name of the device."""

    def __init__(self):
        self.log = []

    def begin(self, num_microbatches, microbatches):
        self.log.append(("begin", num_microbatches, len(microbatches)))

    def copy(self, whole, slices):
        self.log.append(("copy", whole.index))
        return [Microbatch(each.index, ("on the device",), {}, None, each.size) for each in slices]

    def arrive(self, index):
        self.log.append(("arrive", index))


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_pulled_is_copied_to_the_device_and_nothing_else(is_stream):
    slices, copies = [[Microbatch(index, (f"host {index}",), {}, None, 2)] for index in range(3)], Copies()
    whole = [] if is_stream else [row[0] for row in slices]
    prefetcher = Prefetcher(slices, Endless() if is_stream else None, microbatches=whole, copies=copies)

    prefetcher.pull(1)
    prefetcher.arrive(1)

    assert copies.log == [("begin", 3, len(whole)), ("copy", 1), ("arrive", 1)]
    first = "data 0" if is_stream else "host 0"
    assert [row[0].args for row in slices] == [(first,), ("on the device",), ("host 2",)]
