"""Queues: rows beside those of ranks, which run in their order, each after one row of anywhere."""

import numpy as np
import pytest
from numpy import array

from penstock.ir.deps import NONE
from penstock.simulation.queues import Queues
from tests.simulation.drawing import sharded

PROGRAM = sharded("0F0 0F1 0F2")
ALONE = np.full(3, NONE, np.int32)


def walked(queues, before=(ALONE,), lag_s=(0.0, 0.0, 0.0)):
    return queues.walk(list(before), array([1.0, 2.0, 3.0]), array(lag_s))


@pytest.mark.parametrize(("lengths", "after", "end_s"), [([3], [0, 1, 2], [5, 6, 7]), ([1, 2], [0, 0, 0], [5, 2, 3])])
def test_rows_of_a_queue_run_one_behind_the_other_after_their_rows_and_not_after_other_queues(lengths, after, end_s):
    queues = Queues(PROGRAM)

    queues.add(array(lengths), after=array(after), duration_s=array([4.0, 1.0, 1.0]))

    assert walked(queues).end.tolist() == [1, 3, 6, *end_s]


def test_a_row_may_wait_for_one_of_a_queue_and_that_for_one_of_a_later_queue():
    queues = Queues(PROGRAM)
    first = queues.next_row
    queues.add(array([1]), after=array([first + 1]), duration_s=array([1.0]))

    assert queues.next_row == first + 1
    queues.add(array([1]), after=array([0]), duration_s=array([7.0]))

    times = walked(queues, before=(array([NONE, NONE, first], np.int32),), lag_s=(0.0, 0.0, 0.5))
    assert times.end.tolist() == [1, 3, 9.5 + 3, 9, 8]
