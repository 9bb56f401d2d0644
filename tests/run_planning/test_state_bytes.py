"""Bytes of gradients and optimizer state."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.run_planning.state_bytes import gradient_bytes_of, optimizer_bytes_of
from penstock.sizing.layer_work import layer_work
from penstock.train.settings.sections import OptimizerSection, PrecisionSection

MAIN, PLAIN = PrecisionSection(compute="bfloat16"), PrecisionSection()


@pytest.fixture(scope="module")
def half_frozen():
    """The work of a layer in bfloat16 with an adapter in float32, and with a buffer."""
    base = nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
    base.register_buffer("table", torch.ones(256, 256))
    layers = [nn.Embedding(16, 64, dtype=torch.bfloat16).requires_grad_(False), nn.Sequential(base, ToFloat())]
    return layer_work(layers, sequence_length=8)[1]


class ToFloat(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(64, 64)

    def forward(self, hidden):
        return self.adapter(hidden.float())


def test_gradients_are_those_of_trained_parameters_in_their_type(half_frozen):
    assert gradient_bytes_of(PLAIN, half_frozen) == 4 * half_frozen.trainable_parameters == 4 * 64 * 65


def test_main_weights_have_gradients_in_float32():
    layer = layer_work([nn.Embedding(16, 64, dtype=torch.bfloat16)], sequence_length=8)[0]

    assert gradient_bytes_of(MAIN, layer) == 2 * gradient_bytes_of(PLAIN, layer) == 4 * 16 * 64


@pytest.mark.parametrize(
    ("precision", "optimizer", "num_bytes"),
    [
        (MAIN, {"name": "AdamW"}, 12),
        (PLAIN, {"name": "AdamW"}, 8),
        (PLAIN, {"name": "AdamW", "options": {"amsgrad": True}}, 12),
        (PLAIN, {"name": "RMSprop"}, 4),
        (MAIN, {"name": "RMSprop", "options": {"momentum": 0.9, "centered": True}}, 16),
        (MAIN, {"name": "SGD"}, 4),
        (MAIN, {"name": "SGD", "options": {"momentum": 0.9}}, 8),
        (PLAIN, {"name": "Adafactor"}, 4 * 2 / 256),
    ],
)
def test_state_is_that_of_the_optimizer_beside_the_main_weight(precision, optimizer, num_bytes):
    assert optimizer_bytes_of(precision, OptimizerSection(**optimizer), 4) == num_bytes


@pytest.mark.parametrize("name", ["AdanW", "LBFGS"])
def test_an_optimizer_that_cannot_train_is_refused(name):
    with pytest.raises(ConfigError, match=f"optimizer.name: .*{name}"):
        optimizer_bytes_of(PLAIN, OptimizerSection(name=name), 4)
