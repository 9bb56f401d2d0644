"""Waits for data are found by rank, and as the last one before a computation."""

import numpy as np

from penstock.ir.timeline import DataWait
from penstock.simulation import Costs
from penstock.simulation.data_waits import data_ready_s, waits_of_ranks
from tests.simulation.drawing import drawn, row_of
from tests.simulation.slow_data import with_slow_data

PROGRAM = drawn("0F0 0F1 0F2", "1F0 1F1 1F2", num_microbatches=3)
SLOW = {row_of(PROGRAM, "0F1"): 0.5, row_of(PROGRAM, "0F2"): 0.25}


def test_each_rank_has_its_own_waits_in_their_order():
    timeline = with_slow_data(PROGRAM, Costs.uniform(), SLOW)

    assert waits_of_ranks(timeline) == [[DataWait(0, 1, 1.0, 1.5), DataWait(0, 2, 2.5, 2.75)], []]


def test_a_computation_is_fed_when_the_last_wait_of_its_own_rank_before_it_was_over():
    timeline = with_slow_data(PROGRAM, Costs.uniform(), SLOW)

    rows = np.array([row_of(PROGRAM, text) for text in ("0F0", "0F1", "0F2", "1F2")])

    assert data_ready_s(timeline, rows).tolist() == [-np.inf, 1.5, 2.75, -np.inf]
