"""The reference gives the gradients of the unsplit batch, and adds the microbatches' in order."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.microbatch import BatchSpec, Replicate
from penstock.execute.reference import reference_evaluate, reference_step

NUM_CLASSES = 5


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale):
        return torch.tanh(self.linear(x)) * scale


def build_layers():
    return nn.ModuleList([nn.Linear(3, 4), Scaled(), nn.ReLU(), nn.Linear(4, NUM_CLASSES)]).double()


def run_whole(layers, x, scale):
    return layers[3](layers[2](layers[1](layers[0](x), scale)))


def gradients(layers):
    return [parameter.grad for parameter in layers.parameters()]


def assert_same_gradients(layers, others):
    for one, other in zip(gradients(layers), gradients(others), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def make_batch(num_rows):
    x, scale = torch.randn(num_rows, 3).double(), torch.rand(num_rows, 1).double()
    return x, scale, torch.randint(NUM_CLASSES, (num_rows,))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(8, 1), (8, 4), (7, 3), (5, 5)])
def test_gradients_and_loss_are_those_of_the_unsplit_batch(num_rows, num_microbatches, reduction):
    layers = build_layers()
    whole = copy.deepcopy(layers)
    x, scale, target = make_batch(num_rows)

    def loss(output, target):
        return F.cross_entropy(output, target, reduction=reduction)

    expected = loss(run_whole(whole, x, scale), target)
    expected.backward()

    result = reference_step(
        layers,
        (x,),
        {"scale": scale},
        target,
        loss=loss,
        num_microbatches=num_microbatches,
        reduction=reduction,
        allow_ragged=True,
    )

    torch.testing.assert_close(result.loss, expected.detach(), rtol=0, atol=1e-12)
    assert_same_gradients(layers, whole)


def num_tokens(target):
    return (target != -100).sum()


def token_mean(output, target):
    losses = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    total = (losses * (target != -100)).sum()
    return total / num_tokens(target)  # 0/0 where all are ignored: neither it nor its gradients are numbers


def test_token_weighted_loss_is_that_of_the_unsplit_batch_even_with_an_empty_microbatch():
    layers = build_layers()
    whole = copy.deepcopy(layers)
    x, scale, target = make_batch(9)
    target[[0, 3, 4, 5]] = -100  # the second of three microbatches holds no token at all
    expected = token_mean(run_whole(whole, x, scale), target)
    expected.backward()

    result = reference_step(
        layers, (x,), {"scale": scale}, target, loss=token_mean, num_microbatches=3, count=num_tokens
    )

    assert result.losses[1].isnan()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=0, atol=1e-12)
    assert_same_gradients(layers, whole)


def test_a_plain_loop_gives_the_same_bits():
    layers = build_layers()
    plain = copy.deepcopy(layers)
    x, scale, target = make_batch(8)
    losses = []
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        losses.append(F.cross_entropy(run_whole(plain, x[rows], scale[rows]), target[rows]))
        (losses[-1] * 0.25).backward()

    result = reference_step(layers, (x,), {"scale": scale}, target, loss=F.cross_entropy, num_microbatches=4)

    assert all(map(torch.equal, gradients(layers), gradients(plain)))
    assert all(map(torch.equal, result.losses, losses))
    assert torch.equal(result.loss, sum(loss.detach() * 0.25 for loss in losses))


def test_gradients_are_added_to_those_that_are_there():
    layers = build_layers()
    x, scale, target = make_batch(4)

    for _ in range(2):
        reference_step(layers, (x,), {"scale": scale}, target, loss=F.cross_entropy, num_microbatches=2)
    twice = [gradient.clone() for gradient in gradients(layers)]
    layers.zero_grad()
    reference_step(layers, (x,), {"scale": scale}, target, loss=F.cross_entropy, num_microbatches=2)

    for one, two in zip(gradients(layers), twice, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-14, atol=0)


def test_evaluating_gives_the_same_numbers_and_no_gradients():
    layers = build_layers()
    x, scale, target = make_batch(7)
    options = {"loss": F.cross_entropy, "num_microbatches": 3, "allow_ragged": True}

    evaluated = reference_evaluate(layers, (x,), {"scale": scale}, target, **options)
    assert gradients(layers) == [None] * len(gradients(layers))
    stepped = reference_step(layers, (x,), {"scale": scale}, target, **options)

    assert torch.equal(evaluated.loss, stepped.loss)
    assert all(map(torch.equal, evaluated.losses, stepped.losses))
    assert all(map(torch.equal, evaluated.outputs, stepped.outputs))
    assert not any(output.requires_grad for output in evaluated.outputs + stepped.outputs)
    assert not any(loss.requires_grad for loss in [*evaluated.losses, *stepped.losses])
    assert [len(output) for output in stepped.outputs] == [3, 2, 2]


def test_specs_reach_the_splitter():
    layers = build_layers()
    x, _, target = make_batch(4)
    scale = torch.full((4,), 0.5).double()
    options = {"loss": F.cross_entropy, "num_microbatches": 4, "specs": BatchSpec(kwargs=Replicate())}

    result = reference_evaluate(layers, (x,), {"scale": scale}, target, **options)

    torch.testing.assert_close(torch.cat(result.outputs), run_whole(layers, x, scale).detach())


@pytest.mark.parametrize("run", [reference_step, reference_evaluate])
def test_an_unknown_keyword_is_an_error(run):
    x, scale, target = make_batch(4)

    with pytest.raises(PipelineError, match=r"'scales'\. Did you mean 'scale'\?"):
        run(build_layers(), (x,), {"scales": scale}, target, loss=F.cross_entropy, num_microbatches=2)


@pytest.mark.parametrize("run", [reference_step, reference_evaluate])
def test_an_unreduced_loss_is_an_error(run):
    x, scale, target = make_batch(4)

    def unreduced(output, target):
        return F.cross_entropy(output, target, reduction="none")

    with pytest.raises(PipelineError, match=r"microbatch 0: the loss function returned a tensor of shape \(2,\)"):
        run(build_layers(), (x,), {"scale": scale}, target, loss=unreduced, num_microbatches=2)
