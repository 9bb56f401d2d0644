"""`1f1b`: its order as drawn, and as recorded from other systems."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.golden import built, recorded


def test_after_its_warm_up_a_rank_alternates():
    assert_grid(
        build("1f1b", ranks=4, microbatches=6),
        """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
        """,
    )


def test_in_time_the_last_rank_never_waits():
    assert_grid(
        build("1f1b", ranks=3, microbatches=4),
        """
        0F0 0F1 0F2 .   .   .   .   0B0 =   0F3 0B1 =   .   0B2 =   .   0B3 =
        .   1F0 1F1 .   .   1B0 =   1F2 1B1 =   1F3 1B2 =   .   1B3 =
        .   .   2F0 2B0 =   2F1 2B1 =   2F2 2B2 =   2F3 2B3 =
        """,
    )


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


def test_fewer_microbatches_than_ranks_shorten_the_warm_up():
    assert_grid(
        build("1f1b", ranks=4, microbatches=2),
        """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
        3F0 3B0 3F1 3B1
        """,
    )


def test_forward_only_has_the_forwards_alone():
    assert_grid(build("1f1b", ranks=2, microbatches=3, forward_only=True), "0F0 0F1 0F2\n1F0 1F1 1F2")


@pytest.mark.parametrize(("key", "ranks"), recorded("megatron", "1f1b/train"))
def test_the_order_is_that_of_megatron(key, ranks):
    assert built("1f1b", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("megatron", "1f1b/fwd"))
def test_the_forwards_are_those_of_megatron(key, ranks):
    assert built("1f1b", key, forward_only=True) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("torch", "exec/1F1B"))
def test_the_order_is_what_torch_runs(key, ranks):
    assert built("1f1b", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("deepspeed", "TrainSchedule"))
def test_the_order_is_that_of_deepspeed(key, ranks):
    assert built("1f1b", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("pippy", "1F1B/p"))
def test_the_eager_order_is_what_pippy_runs(key, ranks):
    assert built("1f1b", key, warmup="eager") == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("megatron", "enc_dec_1f1b/train"))
def test_an_encoder_and_a_decoder_share_the_order(key, ranks):
    assert built("1f1b", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("zero_bubble", "basic1f1b"))
def test_the_order_is_the_baseline_of_the_zero_bubble_schedulers(key, ranks):
    assert built("1f1b", key) == ranks
