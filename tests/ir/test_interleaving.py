"""Interleaving: warm-up forwards, then forwards and backwards in turn."""

import numpy as np
import pytest

from penstock.ir.interleaving import in_turn


def drawn(turn, stages, microbatches, num_warmup):
    rows = in_turn(np.array(turn), np.array(stages), np.array(microbatches), num_warmup)
    return " ".join(f"{'ab'[stage]}{'FB'[kind]}{microbatch}" for kind, stage, microbatch in rows.tolist())


@pytest.mark.parametrize(
    ("num_warmup", "order"),
    [
        (0, "aF0 bB0 aF1 bB1 bF0 aB0 bF1 aB1"),
        (1, "aF0 aF1 bB0 bF0 bB1 bF1 aB0 aB1"),
        (3, "aF0 aF1 bF0 bF1 bB0 bB1 aB0 aB1"),
        (4, "aF0 aF1 bF0 bF1 bB0 bB1 aB0 aB1"),
    ],
)
def test_a_rank_warms_up_then_runs_forwards_and_backwards_in_turn(num_warmup, order):
    assert drawn([0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1], num_warmup) == order
