"""`1f1b`: its order as drawn, and as recorded from other systems."""

import pytest

from penstock.schedules import build
from tests.schedules.docstrings import assert_drawn
from tests.schedules.golden import built, recorded
from tests.support.grids import assert_grid


@pytest.mark.feature("0.16", "B3")
def test_after_its_warm_up_a_rank_alternates():
    assert_drawn("1f1b")


@pytest.mark.feature("0.9", "B3")
def test_eager_warm_up_is_twice_as_long():
    assert_grid(
        build("1f1b", ranks=4, microbatches=6, warmup="eager"),
        """
        0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1B2 1B3 1B4 1B5
        2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
        """,
    )


@pytest.mark.parametrize(
    ("key", "ranks"),
    [
        *recorded("megatron", "1f1b/train"),
        *recorded("megatron", "enc_dec_1f1b/train"),  # an encoder and a decoder share the order
        *recorded("torch", "exec/1F1B"),
        *recorded("zero_bubble", "basic1f1b"),  # the baseline of its schedulers
    ],
)
def test_the_order_is_that_of_megatron_torch_and_the_zero_bubble_authors(key, ranks):
    assert built("1f1b", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("megatron", "1f1b/fwd"))
def test_the_forwards_are_those_of_megatron(key, ranks):
    assert built("1f1b", key, forward_only=True) == ranks


@pytest.mark.feature("B12")
@pytest.mark.parametrize(("key", "ranks"), recorded("deepspeed", "TrainSchedule"))
def test_the_order_is_that_of_deepspeed(key, ranks):
    assert built("1f1b", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("pippy", "1F1B/p"))
def test_the_eager_order_is_what_pippy_runs(key, ranks):
    assert built("1f1b", key, warmup="eager") == ranks
