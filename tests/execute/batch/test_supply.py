"""Data are pulled before the first call that needs them, as soon as the rank would wait, and let go after the last."""

import pytest

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.stream import DataTimes
from penstock.execute.batch.supply import Supply, rows_that_take_data, without_data
from penstock.execute.calls import Bound
from penstock.execute.stages.stage import Stage
from penstock.ir.instruction import Op
from penstock.ir.timeline import DataWait
from penstock.lowering import lower
from penstock.schedules import build
from tests.test_streamed_steps import Masked

EMPTY = Microbatch(0, (), {}, None, 2)


class Endless:
    times = DataTimes()
    waits = (DataWait(0, 1, 0.5, 0.75),)

    def next(self, index):
        return [Microbatch(index, (f"data {index}",), {}, None, 2)]


def woven(calls, needs):
    """Run calls, `0w` a wait of row 0 and `0` its computation, and tell what ran and what was pulled and let go."""
    log = []
    slices = [[EMPTY] for _ in range(1 + max(needs.values(), default=0))]

    class Noting(Supply):
        def pull(self, microbatch):
            log.append(f"pull {microbatch}")

        def let_go(self, microbatch):
            log.append(f"drop {microbatch}")

    def bound(text):
        row = int(text.rstrip("w"))
        return Bound(row, lambda: log.append(text), 99 if text.endswith("w") else None)

    supply = Noting(slices, Endless())
    for each in supply.woven_into([bound(text) for text in calls.split()], needs):
        each.call()
    return ", ".join(log)


@pytest.mark.parametrize(
    ("calls", "needs", "wanted"),
    [
        ("0 1 2", {0: 0, 2: 1}, "pull 0, 0, drop 0, 1, pull 1, 2, drop 1"),
        ("0 1 2w 2 3w 3 4", {0: 0, 4: 1}, "pull 0, 0, drop 0, 1, pull 1, 2w, 2, 3w, 3, 4, drop 1"),
        ("0w 0 1w 1", {0: 0, 1: 1}, "pull 0, 0w, 0, drop 0, pull 1, 1w, 1, drop 1"),
        ("0 1w 1 2", {0: 1, 2: 0}, "pull 1, 0, drop 1, pull 0, 1w, 1, 2, drop 0"),
        ("0 1 2", {0: 0, 1: 0, 2: 0}, "pull 0, 0, 1, 2, drop 0"),
        ("0 1", {}, "0, 1"),
    ],
    ids=["no wait", "a wait between", "its own wait", "out of order", "three slices", "nothing"],
)
def test_a_pull_comes_at_the_next_wait_and_at_the_latest_before_its_use(calls, needs, wanted):
    assert woven(calls, needs) == wanted


def test_a_later_microbatch_brings_those_before_it():
    slices = [[EMPTY] for _ in range(4)]
    supply = Supply(slices, Endless())

    supply.pull(2)
    supply.pull(1)

    assert [row[0].args for row in slices] == [("data 0",), ("data 1",), ("data 2",), ()]


def test_what_is_let_go_keeps_its_number_and_its_size():
    slices = [[Microbatch(0, ("x",), {"mask": 1}, "y", 2, 0, 5), Microbatch(0, ("x",), {}, "y", 2, 1, 4)]]

    Supply(slices).let_go(0)

    assert slices == [[Microbatch(0, (), {}, None, 2, 0, 5), Microbatch(0, (), {}, None, 2, 1, 4)]]
    assert without_data(slices[0][0]) == slices[0][0]


def test_a_batch_that_is_there_needs_no_pull_and_costs_no_time():
    supply = Supply([[EMPTY], [EMPTY]])

    supply.pull(1)

    assert supply.times == DataTimes()
    assert supply.waits == ()


def test_the_waits_for_data_are_those_of_their_source():
    assert Supply([[EMPTY]], Endless()).waits == Endless.waits


@pytest.mark.parametrize(("rank", "takes"), [(0, {"0F0": 0, "0F1": 1}), (1, {}), (2, {"2F0": 0, "2F1": 1})])
def test_forwards_of_end_stages_take_data(rank, takes):
    assert data_rows_of(rank, Stage(rank, {})) == takes


def test_forwards_of_layers_that_take_keywords_take_data():
    assert data_rows_of(1, Stage(1, {"masked": Masked(0)})) == {"1F0": 0, "1F1": 1}


def data_rows_of(rank, stage):
    program = lower(build("1f1b", ranks=3, microbatches=2))
    rows = range(int(program.offsets[rank]), int(program.offsets[rank + 1]))
    found = rows_that_take_data(program, rows, {rank: stage})
    assert all(program.op[row] == Op.FORWARD for row in found)
    return {str(program.instruction(row)): microbatch for row, microbatch in found.items()}
