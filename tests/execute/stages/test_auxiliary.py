"""What the layers of a stage add becomes one more output of its graph, whose gradient is there from the start."""

import torch
from torch import nn

from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.stages.auxiliary import AddedLossPart, Auxiliary, take_all
from penstock.execute.stages.feature import modules_with
from penstock.execute.stages.stage import Stage
from penstock.models import AuxiliaryLoss
from tests.support.local_pipelines import WIDTH, settle, values
from tests.support.one_stage import PLACE, OneStage, step_of
from tests.support.using import Using


def probe(self, x):
    """Add the squares of the outputs under one name and their mean under another."""
    output = self.linear(x)
    self.squares.add(output.square().mean())
    self.mean.add(output.mean())
    return output


def probed(seed):
    parts = {"squares": AuxiliaryLoss("squares", 0.5), "mean": AuxiliaryLoss("mean", 3.0)}
    return Using(probe, linear=settle(nn.Linear(WIDTH, WIDTH), seed), **parts)


SQUARES, MEAN = (LossName(name, True, torch.float32) for name in ("squares", "mean"))


def leaf():
    return values(1, 3, WIDTH).requires_grad_()


def probed_stage():
    """Return a stage by itself whose layers add losses of weight 0.25, and what notes them."""
    stage, step = Stage(4, {"a": probed(0), "b": nn.Sequential(probed(1), nn.Tanh())}), step_of(auxiliary=0.25)
    return OneStage(stage, features=[adding(modules_with(stage.modules, Auxiliary))], step=step), step.losses


def adding(modules):
    """The feature of a stage with these modules."""
    return lambda step, place: AddedLossPart(modules, step.losses, place)


def test_every_module_is_found_once_however_deep():
    shared = AuxiliaryLoss("shared")
    layers = [nn.Sequential(probed(0), nn.ModuleDict({"x": shared})), shared, nn.Linear(2, 2)]

    assert [module.name for module in modules_with(layers, Auxiliary)] == ["squares", "mean", "shared"]


def test_its_backward_is_that_of_the_output_and_of_what_was_added():
    one, _ = probed_stage()
    inputs, gradient = leaf(), values(5, 3, WIDTH)

    (found,) = one.backward(one.saved(inputs), gradient)

    alone = probed_stage()[0].stage
    other = leaf()
    output = nn.Sequential(*alone.modules)(other)
    added = take_all(modules_with(alone.modules, Auxiliary))[1]
    torch.autograd.backward([output, added * 0.25], [gradient, None])
    assert torch.equal(found, other.grad)
    pairs = zip(one.stage.named_parameters(), alone.named_parameters(), strict=True)
    assert all(torch.equal(mine.grad, plain.grad) for (_, mine), (_, plain) in pairs)


def test_values_are_noted_before_their_weights_and_the_total_after():
    one, losses = probed_stage()
    first = one.stage.layers["a"].linear(values(1, 3, WIDTH))
    second = one.stage.layers["b"][0].linear(first)
    one.forward(leaf())

    squares, mean = first.square().mean() + second.square().mean(), first.mean() + second.mean()
    torch.testing.assert_close(losses.named_losses[SQUARES][PLACE].float(), squares)
    torch.testing.assert_close(losses.named_losses[MEAN][PLACE].float(), mean)
    total = losses.named_losses[LossName(ALL_TOGETHER, True, torch.float32)][PLACE]
    torch.testing.assert_close(total.float(), 0.5 * squares + 3.0 * mean)
    assert not any(loss.requires_grad for found in losses.named_losses.values() for loss in found.values())


def test_a_forward_that_adds_nothing_notes_nothing():
    stage = Stage(0, {"a": nn.Sequential(nn.Linear(WIDTH, WIDTH))})
    one = OneStage(stage, features=[adding([AuxiliaryLoss("never")])])

    saved = one.saved(leaf())

    assert (len(saved.edges), saved.parts[0].roots(), one.step.losses.named_losses) == (1, ([], []), {})
