"""Bytes of gradients and optimizer state."""

import pytest

from penstock.run_planning.state_bytes import gradient_bytes_of, optimizer_bytes_of
from penstock.train.settings.sections import OptimizerSection, PrecisionSection

MAIN, PLAIN = PrecisionSection(compute="bfloat16"), PrecisionSection()


def test_main_weights_have_gradients_in_float32():
    assert gradient_bytes_of(MAIN, 2) == 4
    assert gradient_bytes_of(PLAIN, 2) == 2
    assert gradient_bytes_of(PrecisionSection(compute="bfloat16", autocast=True), 4) == 4


@pytest.mark.parametrize(
    ("precision", "optimizer", "num_bytes"),
    [
        (MAIN, {"name": "AdamW"}, 12),
        (PLAIN, {"name": "AdamW"}, 8),
        (MAIN, {"name": "SGD"}, 4),
        (MAIN, {"name": "SGD", "options": {"momentum": 0.9}}, 8),
        (PLAIN, {"name": "Adafactor"}, 0),
    ],
)
def test_state_is_that_of_the_optimizer_beside_the_main_weight(precision, optimizer, num_bytes):
    assert optimizer_bytes_of(precision, OptimizerSection(**optimizer), 4) == num_bytes
