"""debug="values" finds a call that leaves what its row does not declare, and one that leaves too little."""

from contextlib import contextmanager

import pytest

from penstock.execute.observing.declared_values import Declared
from penstock.execute.observing.observer import Observer
from penstock.ir.recompute import with_recompute
from penstock.lowering import lower
from penstock.schedules import build
from tests.support.compiled import row_of
from tests.support.local_pipelines import error_of, float_task, on_pipelines, on_ranks, pipeline_of, step_task


def declared(program, text, rank=0):
    found = Declared(program, rank)
    taken, put = found.of(row_of(program, text, rank))
    return [sorted(map(found.keys.name, keys)) for keys in (taken, put)]


def test_a_row_declares_what_its_columns_say():
    program = lower(build("1f1b", ranks=2, microbatches=1))

    assert declared(program, "0F0") == [[], ["result of 0F0", "saved activation of 0F0"]]
    assert declared(program, "0SEND_F0") == [["result of 0F0"], []]
    assert declared(program, "0RECV_B0") == [[], ["received message of 0RECV_B0"]]
    assert declared(program, "0B0") == [["received message of 0RECV_B0", "saved activation of 0F0"], []]
    assert declared(program, "1B0", 1) == [["saved activation of 1F0"], ["result of 1B0"]]
    assert declared(program, "0REDUCE_GRAD") == [[], []]
    evaluation = lower(build("1f1b", ranks=1, microbatches=1, forward_only=True))
    assert declared(evaluation, "0F0") == [[], []]


def test_recomputations_and_parts_of_backwards_take_and_put_under_one_key():
    program = lower(with_recompute(build("zb-h1", ranks=1, microbatches=1)))
    kept = ["saved activation of 0F0"]

    assert [declared(program, text) for text in ("0F0", "0R0", "0I0", "0W0")] == [
        [[], kept],
        [kept, kept],
        [kept, kept],
        [kept, []],
    ]


class Spoiling(Observer):
    """Changes the values behind the first call."""

    def __init__(self, spoil):
        self.spoil = spoil

    def around(self, program, bound):
        return self.spoiling

    @contextmanager
    def spoiling(self, step):
        self.spoil(step.values)
        yield


@pytest.mark.parametrize(
    "family", ["1f1b", "dualpipe-v", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zbv", "looped-bfs"))]
)
def test_a_step_that_is_right_passes(family):
    task = float_task(8)

    on_pipelines(2, task, lambda pipeline: step_task(pipeline, task), family, debug="values")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda values: values.update({99: "stray"}), "after 0F0 there is left what no row declares: value 99"),
        (lambda values: values.pop(0, None), "there is no more what a later row reads: saved activation of 0F"),
    ],
)
def test_a_value_too_many_and_one_too_few_are_told_with_the_call(spoil, text):
    task = float_task(8)

    def case(wires):
        observers = [Spoiling(spoil)] if wires.rank == 0 else []
        step_task(pipeline_of(wires, task, debug="values", observers=observers), task)

    assert text in str(error_of(on_ranks, 2, case))
