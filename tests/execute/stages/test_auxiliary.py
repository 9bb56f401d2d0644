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


class Probed(nn.Module):
    """Adds the squares of its outputs under one name and their mean under another."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH), seed)
        self.squares, self.mean = AuxiliaryLoss("squares", 0.5), AuxiliaryLoss("mean", 3.0)

    def forward(self, x):
        output = self.linear(x)
        self.squares.add(output.square().mean())
        self.mean.add(output.mean())
        return output


SQUARES, MEAN = (LossName(name, True, torch.float32) for name in ("squares", "mean"))


def stage_and_step(weight=0.25, **options):
    stage = Stage(4, {"a": Probed(0), "b": nn.Sequential(Probed(1), nn.Tanh())})
    return at_work(stage, step_of(auxiliary=weight, **options))


def adding(modules):
    """The feature of a stage with these modules."""
    return lambda step, place: AddedLossPart(modules, step.losses, place)


def at_work(stage, step, **options):
    one = OneStage(stage, features=[adding(modules_with(stage.modules, Auxiliary))], step=step, **options)
    return one, step.losses


def leaf():
    return values(1, 3, WIDTH).requires_grad_()


def test_every_module_is_found_once_however_deep():
    shared = AuxiliaryLoss("shared")
    layers = [nn.Sequential(Probed(0), nn.ModuleDict({"x": shared})), shared, nn.Linear(2, 2)]

    assert [module.name for module in modules_with(layers, Auxiliary)] == ["squares", "mean", "shared"]


def test_its_backward_is_that_of_the_output_and_of_what_was_added():
    one, _ = stage_and_step()
    inputs, gradient = leaf(), values(5, 3, WIDTH)

    (found,) = one.backward(one.saved(inputs), gradient)

    alone = stage_and_step()[0].stage
    other = leaf()
    output = nn.Sequential(*alone.modules)(other)
    added = take_all(modules_with(alone.modules, Auxiliary))[1]
    torch.autograd.backward([output, added * 0.25], [gradient, None])
    assert torch.equal(found, other.grad)
    pairs = zip(one.stage.named_parameters(), alone.named_parameters(), strict=True)
    assert all(torch.equal(mine.grad, plain.grad) for (_, mine), (_, plain) in pairs)


def test_values_are_noted_before_their_weights_and_the_total_after():
    one, losses = stage_and_step()
    first = one.stage.layers["a"].linear(values(1, 3, WIDTH))
    second = one.stage.layers["b"][0].linear(first)
    one.forward(leaf())

    squares, mean = (sum(part(output) for output in (first, second)) for part in (square_mean, torch.mean))
    torch.testing.assert_close(losses.named_losses[SQUARES][PLACE].float(), squares)
    torch.testing.assert_close(losses.named_losses[MEAN][PLACE].float(), mean)
    total = losses.named_losses[LossName(ALL_TOGETHER, True, torch.float32)][PLACE]
    torch.testing.assert_close(total.float(), 0.5 * squares + 3.0 * mean)
    assert not any(loss.requires_grad for found in losses.named_losses.values() for loss in found.values())


def square_mean(output):
    return output.square().mean()


def test_a_forward_that_adds_nothing_notes_nothing():
    stage = Stage(0, {"a": nn.Sequential(nn.Linear(WIDTH, WIDTH))})
    one = OneStage(stage, features=[adding([AuxiliaryLoss("never")])])

    saved = one.saved(leaf())

    assert (len(saved.edges), saved.parts[0].roots(), one.step.losses.named_losses) == (1, ([], []), {})
