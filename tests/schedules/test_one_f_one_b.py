"""`1f1b`: its order as drawn, and as recorded from other systems."""

import pytest

from tests.schedules.golden import assert_recorded


@pytest.mark.feature("B12")
@pytest.mark.parametrize(
    ("system", "prefix", "options"),
    [
        ("megatron", "1f1b/train", {}),
        ("megatron", "1f1b/fwd", {"forward_only": True}),
        ("megatron", "enc_dec_1f1b/train", {}),  # an encoder and a decoder share the order
        ("torch", "exec/1F1B", {}),
        ("zero_bubble", "basic1f1b", {}),  # the baseline of its schedulers
        ("deepspeed", "TrainSchedule", {}),
        ("pippy", "1F1B/p", {"warmup": "eager"}),
    ],
)
def test_the_order_is_that_of_other_systems(system, prefix, options):
    assert_recorded("1f1b", system, prefix, lambda size: options)
