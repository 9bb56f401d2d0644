"""The data of a step are pulled in order, and dropped but for their sizes."""

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.prefetch import Prefetcher, without_data
from penstock.execute.batch.stream import DataTimes
from penstock.ir.timeline import DataWait

EMPTY = Microbatch(0, (), {}, None, 2)


class Endless:
    times = DataTimes()
    waits = (DataWait(0, 1, 0.5, 0.75),)

    def next(self, index):
        return [Microbatch(index, (f"data {index}",), {}, None, 2)]


def test_a_later_microbatch_brings_those_before_it():
    slices = [[EMPTY] for _ in range(4)]
    prefetcher = Prefetcher(slices, Endless())

    prefetcher.pull(2)
    prefetcher.pull(1)

    assert [row[0].args for row in slices] == [("data 0",), ("data 1",), ("data 2",), ()]


def test_what_is_let_go_keeps_its_number_and_its_size():
    slices = [[Microbatch(0, ("x",), {"mask": 1}, "y", 2, 0, 5), Microbatch(0, ("x",), {}, "y", 2, 1, 4)]]

    Prefetcher(slices).release(0)

    assert slices == [[Microbatch(0, (), {}, None, 2, 0, 5), Microbatch(0, (), {}, None, 2, 1, 4)]]
    assert without_data(slices[0][0]) == slices[0][0]


def test_a_batch_that_is_there_needs_no_pull_and_costs_no_time():
    prefetcher = Prefetcher([[EMPTY], [EMPTY]])

    prefetcher.pull(1)

    assert prefetcher.times == DataTimes()
    assert prefetcher.waits == ()


def test_the_waits_for_data_are_those_of_their_source():
    assert Prefetcher([[EMPTY]], Endless()).waits == Endless.waits
