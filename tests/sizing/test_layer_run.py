"""The passes of one layer: what they compute, what waits for W, and the memory that they take meanwhile."""

import pytest
import torch
from torch import nn

from penstock.models import cross_entropy_loss
from penstock.sizing.fake_layers import FakeLayers
from penstock.sizing.layer_run import LayerCall, work_of
from penstock.train.activation_checkpoints import checkpoint_layer
from tests.sizing.models import Block

ROWS, WIDTH, HIDDEN = 512, 64, 256
PRODUCT = 2 * ROWS * WIDTH * HIDDEN
"""Floating-point operations of one product of a block."""
FLOAT = 4


def fake_call(layer, *inputs, finish=lambda output: output, is_last=False):
    fake_layers = FakeLayers()
    module = fake_layers.build(layer, "layer")
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = fake_layers.like(parameter)
    inputs = tuple(fake_layers.like(item).requires_grad_() if item.is_floating_point() else item for item in inputs)
    return LayerCall("layer", 1, module, inputs, {}, {}, finish, is_last=is_last)


def workspaces(layer, inputs, finish=lambda output: output, *, is_last=False):
    """Return the workspaces of a layer with values."""
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    work = work_of(LayerCall("layer", 1, layer, inputs, {}, {}, finish, is_last=is_last))
    return work.forward_workspace_bytes, work.backward_workspace_bytes


def hidden():
    return torch.randn(1, ROWS, WIDTH, requires_grad=True)


def test_a_block_computes_each_product_once_forward_and_twice_backward():
    work = work_of(fake_call(Block(WIDTH, HIDDEN), hidden()))

    assert work.forward.flops == work.backward_input.flops == work.backward_weight.flops == 2 * PRODUCT
    # Both products wait with their inputs and the gradients of their outputs.
    assert work.weight_context_bytes == FLOAT * ROWS * 2 * (WIDTH + HIDDEN)
    assert all(work.gets_gradient)


def test_frozen_weights_have_no_gradients_and_nothing_waits():
    block = Block(WIDTH, HIDDEN).requires_grad_(False)

    work = work_of(fake_call(block, hidden()))

    assert (work.backward_input.flops, work.backward_weight.flops) == (2 * PRODUCT, 0)
    assert work.weight_context_bytes == 0
    assert not any(work.gets_gradient)


def test_weights_that_are_too_small_to_wait_are_computed_with_the_inputs():
    small = nn.Linear(8, 8)

    work = work_of(fake_call(small, torch.randn(4, 8, requires_grad=True)))

    assert work.backward_input.flops == 2 * work.forward.flops
    assert (work.backward_weight.flops, work.weight_context_bytes) == (0, 0)


@pytest.mark.parametrize(("kind", "repeated_flops"), [("none", 0), ("full", 1), ("selective", 0)])
def test_checkpointing_computes_again_what_it_did_not_keep(kind, repeated_flops):
    """Full checkpointing stops before the last product, whose result no backward needs."""
    work = work_of(fake_call(checkpoint_layer(Block(WIDTH, HIDDEN), kind), hidden()))

    assert work.backward_input.flops == (2 + repeated_flops) * PRODUCT
    assert work.backward_weight.flops == 2 * PRODUCT


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_workspaces_are_those_of_the_layer_with_values(kind):
    work = work_of(fake_call(checkpoint_layer(Block(WIDTH, HIDDEN), kind), hidden()))

    measured = workspaces(checkpoint_layer(Block(WIDTH, HIDDEN), kind), (hidden(),))
    assert (work.forward_workspace_bytes, work.backward_workspace_bytes) == pytest.approx(measured, rel=0.001)
    assert min(measured) > 0


def test_the_workspaces_of_a_head_are_copies_of_its_logits():
    vocabulary = 4096
    tokens = torch.zeros(1, ROWS, dtype=torch.int64)

    def loss(logits):
        return cross_entropy_loss(logits.float(), tokens)

    head = nn.Linear(WIDTH, vocabulary, dtype=torch.bfloat16)
    inputs = hidden().bfloat16().detach().requires_grad_()
    work = work_of(fake_call(head, inputs, finish=loss, is_last=True))

    measured = workspaces(head, (inputs,), loss, is_last=True)
    assert (work.forward_workspace_bytes, work.backward_workspace_bytes) == pytest.approx(measured, rel=0.001)
    assert min(measured) > 1.4 * FLOAT * ROWS * vocabulary
