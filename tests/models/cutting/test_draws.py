"""Which calls of operators draw."""

import pytest
import torch
from torch.nn import functional

from penstock.models.cutting.draws import UnknownDraws, draws_in_place, is_draw


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "draws"),
    [
        ("rand", (3,), {}, True),
        ("dropout", ("x", 0.5, True), {}, True),
        ("dropout", ("x",), {"p": 0.5, "training": False}, False),
        ("dropout2d", ("x", 0.0, True), {}, False),
        ("scaled_dot_product_attention", ("q", "k", "v"), {"dropout_p": 0.1}, True),
        ("scaled_dot_product_attention", ("q", "k", "v"), {}, False),
        ("relu", ("x",), {}, False),
    ],
)
def test_dropouts_draw_in_training_with_a_probability(name, args, kwargs, draws):
    assert is_draw(name, args, kwargs) is draws


def test_draws_in_place_are_known():
    assert draws_in_place("bernoulli_", ("x",), {})
    assert draws_in_place("dropout", ("x", 0.5, True, True), {})
    assert draws_in_place("rrelu", ("x",), {"inplace": True})
    assert not draws_in_place("dropout", ("x", 0.5, True), {})


def test_kernels_that_draw_are_found_and_those_of_a_dropout_that_does_nothing_are_not():
    values = torch.ones(3)
    with UnknownDraws() as draws, torch.inference_mode():
        functional.dropout(values, 0.5, training=False)
        functional.scaled_dot_product_attention(*[values.view(1, 1, 3)] * 3)
        with draws.expected():
            torch.rand(3)
        assert draws.name == ""
        torch.normal(values, values)
    assert draws.name == "normal"
