"""The reference gives the gradients of the unsplit batch, and adds the microbatches' in order."""

import ast
import copy
import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock import LossOutput
from penstock.models import AuxiliaryLoss
from tests.exactness import one_process
from tests.random_models import one_process as one_process_of_random_models
from tests.support import reference
from tests.support.reference import reference_step

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
    """Arguments, keywords and target."""
    x, scale = torch.randn(num_rows, 3).double(), torch.rand(num_rows, 1).double()
    return (x,), {"scale": scale}, torch.randint(NUM_CLASSES, (num_rows,))


def assert_as_unsplit(batch, loss, **options):
    """The loss and the gradients are those of the batch as a whole; return the result."""
    layers = build_layers()
    whole = copy.deepcopy(layers)
    args, keywords, target = batch
    expected = loss(run_whole(whole, *args, **keywords), target)
    expected.backward()

    result = reference_step(layers, *batch, loss=loss, **options)

    torch.testing.assert_close(result.loss, expected.detach(), rtol=0, atol=1e-12)
    assert_same_gradients(layers, whole)
    return result


@pytest.mark.parametrize("judge", [reference, one_process, one_process_of_random_models])
def test_a_judge_shares_no_code_with_the_pipeline(judge):
    """Of Penstock it may import the types that users pass in."""
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(judge))) if isinstance(node, ast.ImportFrom)]
    found = {(each.module, alias.name) for each in imports for alias in each.names if "penstock" in each.module}

    assert found <= {("penstock", name) for name in ("LossOutput", "PreSplit", "Replicate", "Split")}


@pytest.mark.feature("0.8", "E1")
@pytest.mark.parametrize(("num_rows", "num_microbatches", "reduction"), [(8, 4, "mean"), (7, 3, "mean"), (7, 3, "sum")])
def test_gradients_and_loss_are_those_of_the_unsplit_batch(num_rows, num_microbatches, reduction):
    loss = partial(F.cross_entropy, reduction=reduction)
    options = {"num_microbatches": num_microbatches, "reduction": reduction, "allow_ragged": True}

    assert_as_unsplit(make_batch(num_rows), loss, **options)


def num_tokens(target):
    return (target != -100).sum()


def token_mean(output, target):
    losses = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    total = (losses * (target != -100)).sum()
    return total / num_tokens(target)  # 0/0 where all are ignored: neither it nor its gradients are numbers


@pytest.mark.feature("X20")
def test_token_weighted_loss_is_that_of_the_unsplit_batch_even_with_an_empty_microbatch():
    batch = make_batch(9)
    batch[-1][[0, 3, 4, 5]] = -100  # the second of three microbatches holds no token at all

    assert assert_as_unsplit(batch, token_mean, num_microbatches=3, count=num_tokens).losses[1].isnan()


def test_a_plain_loop_gives_the_same_bits():
    layers = build_layers()
    plain = copy.deepcopy(layers)
    batch = (x,), keywords, target = make_batch(8)
    losses = []
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        losses.append(F.cross_entropy(run_whole(plain, x[rows], keywords["scale"][rows]), target[rows]))
        (losses[-1] * 0.25).backward()

    result = reference_step(layers, *batch, loss=F.cross_entropy, num_microbatches=4)

    assert all(map(torch.equal, gradients(layers), gradients(plain)))
    assert all(map(torch.equal, result.losses, losses))
    assert torch.equal(result.loss, sum(loss.detach() * 0.25 for loss in losses))


# ---- forms of losses, and losses of layers


class Adding(nn.Module):
    """Adds the mean square of its outputs, and how far their mean is from 0."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.size, self.bias = AuxiliaryLoss("size", 0.5), AuxiliaryLoss("bias", 0.0)

    def forward(self, x):
        output = self.linear(x)
        self.size.add(output.square().mean())
        self.bias.add(output.mean())
        return output


def test_losses_of_layers_are_means_over_the_unsplit_batch():
    layers = nn.ModuleList([Adding(), nn.Tanh(), Adding()])
    whole = copy.deepcopy(layers)
    x, target = torch.randn(7, 4).double(), torch.randn(7, 4).double()

    found = reference_step(layers, (x,), {}, target, loss=F.mse_loss, num_microbatches=3, allow_ragged=True)

    hidden = whole[0].linear(x)
    output = whole[2].linear(torch.tanh(hidden))
    size, bias = (sum(part(y) for y in (hidden, output)) for part in (lambda y: y.square().mean(), torch.mean))
    (F.mse_loss(output, target) + 0.5 * size).backward()
    assert_same_gradients(layers, whole)
    torch.testing.assert_close(found.loss, F.mse_loss(output, target).detach())
    torch.testing.assert_close(found.named_losses, {"size": size.detach(), "bias": bias.detach()})
    torch.testing.assert_close(found.total, found.loss + 0.5 * size.detach())


def test_all_forms_of_one_loss_have_its_gradients():
    def total(output, target):
        return F.cross_entropy(output, target, ignore_index=0, reduction="sum")

    def count(target):
        return int((target != 0).sum())

    forms = [
        lambda output, target: total(output, target) / count(target),
        lambda output, target: (total(output, target), count(target)),
        lambda output, target: {"a": total(output, target) / count(target)},
        lambda output, target: LossOutput({"a": total(output, target)}, count(target), reported=len(target)),
        lambda output, target, *, weight: total(output, target) * weight / count(target) / weight,
    ]
    batch = make_batch(8)
    batch[-1][:] = torch.tensor([0, 1, 2, 3, 0, 0, 4, 1])
    first = build_layers()
    results = []
    for form in forms:
        layers = copy.deepcopy(first)
        results.append(reference_step(layers, *batch, loss=form, num_microbatches=4, count=count))
        if form is forms[0]:
            one = layers
        assert_same_gradients(layers, one)

    assert [list(result.named_losses) for result in results] == [[], [], ["a"], ["a"], []]
    assert [result.reported for result in results] == [[], [], [], [2, 2, 2, 2], []]
    for result in results:
        torch.testing.assert_close(result.total, results[0].loss)
