"""The data of one step come when they are needed and go after their last use."""

from penstock.execute.batch.microbatch import Microbatch, without_data
from penstock.execute.batch.prefetcher import Prefetcher
from penstock.execute.batch.stream import DataTimes
from penstock.ir.timeline import DataWait

EMPTY = Microbatch(0, (), {}, None, 2)


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


def test_what_is_pulled_is_copied_to_the_device_and_nothing_else():
    slices, copies = [[Microbatch(index, (f"host {index}",), {}, None, 2)] for index in range(3)], Copies()
    prefetcher = Prefetcher(slices, microbatches=[row[0] for row in slices], copies=copies)

    prefetcher.pull(1)
    prefetcher.arrive(1)

    assert copies.log == [("begin", 3, 3), ("copy", 1), ("arrive", 1)]
    assert [row[0].args for row in slices] == [("host 0",), ("on the device",), ("host 2",)]


def test_of_a_stream_only_the_microbatch_that_is_needed_is_copied():
    slices, copies = [[EMPTY] for _ in range(3)], Copies()
    prefetcher = Prefetcher(slices, Endless(), copies=copies)

    prefetcher.pull(1)
    prefetcher.pull(0)

    assert copies.log == [("begin", 3, 0), ("copy", 1), ("copy", 0)]
    assert [row[0].args for row in slices] == [("on the device",), ("on the device",), ()]
