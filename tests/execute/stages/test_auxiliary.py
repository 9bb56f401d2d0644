"""What the layers of a stage add becomes one more output of its graph, whose gradient is there from the start."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.step import Step
from penstock.execute.losses.loss import LossShares
from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.stages.auxiliary import StageWithLosses, auxiliary_modules, auxiliary_of, take_all
from penstock.execute.stages.stage import Stage
from penstock.models import AuxiliaryLoss
from tests.local_pipelines import WIDTH, settle, values


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


PLACE = (1, 0)
SQUARES, MEAN = (LossName(name, True, torch.float32) for name in ("squares", "mean"))


def stage_and_step(rows=(0.75, 0.25), **options):
    stage = Stage(4, {"a": Probed(0), "b": nn.Sequential(Probed(1), nn.Tanh())})
    slices = [[Microbatch(index, (), {}, None, 1)] for index in range(2)]
    shares = LossShares(list(rows), [[1.0], [1.0]])
    return stage, Step(slices, LossShares([], []), None, keeps_outputs=False, auxiliary_shares=shares, **options)


def at_work(stage, step):
    return StageWithLosses(stage, auxiliary_modules([*stage.layers.values()]), PLACE, lambda: step)


def forward(stage, step, inputs):
    losses = at_work(stage, step)
    outputs = losses.running(stage.forward)((inputs,), {})
    return losses.saving(stage.save)((inputs,), outputs), outputs


def leaf():
    return values(1, 3, WIDTH).requires_grad_()


def test_every_module_is_found_once_however_deep():
    shared = AuxiliaryLoss("shared")
    layers = [nn.Sequential(Probed(0), nn.ModuleDict({"x": shared})), shared, nn.Linear(2, 2)]

    assert [module.name for module in auxiliary_modules(layers)] == ["squares", "mean", "shared"]


def test_its_backward_is_that_of_the_output_and_of_what_was_added():
    stage, step = stage_and_step()
    inputs, gradient = leaf(), values(5, 3, WIDTH)
    saved, _ = forward(stage, step, inputs)

    (found,) = stage.backward(saved, [gradient, *saved.loss_gradients])

    alone, _ = stage_and_step()
    other = leaf()
    output = alone.forward((other,), {})
    added = take_all(auxiliary_modules([*alone.layers.values()])).total
    torch.autograd.backward([output, added * 0.25], [gradient, None])
    assert torch.equal(found, other.grad)
    pairs = zip(stage.named_parameters(), alone.named_parameters(), strict=True)
    assert all(torch.equal(mine.grad, plain.grad) for (_, mine), (_, plain) in pairs)
    assert step.roots == {}


def test_values_are_noted_before_their_weights_and_the_total_after():
    stage, step = stage_and_step()
    first = stage.layers["a"].linear(values(1, 3, WIDTH))
    second = stage.layers["b"][0].linear(first)
    forward(stage, step, leaf())

    squares, mean = (sum(part(output) for output in (first, second)) for part in (square_mean, torch.mean))
    torch.testing.assert_close(step.named[SQUARES][PLACE].float(), squares)
    torch.testing.assert_close(step.named[MEAN][PLACE].float(), mean)
    total = step.named[LossName(ALL_TOGETHER, True, torch.float32)][PLACE]
    torch.testing.assert_close(total.float(), 0.5 * squares + 3.0 * mean)
    assert not any(loss.requires_grad for losses in step.named.values() for loss in losses.values())


def square_mean(output):
    return output.square().mean()


def test_what_several_stages_of_a_rank_add_is_added_up():
    stage, step = stage_and_step()

    forward(stage, step, leaf())
    once = step.named[SQUARES][PLACE].clone()
    forward(stage, step, leaf())

    assert torch.equal(step.named[SQUARES][PLACE], 2 * once)


def test_it_is_scaled_where_its_backward_begins():
    stage, step = stage_and_step(scale=lambda loss: loss * 8.0)
    plain, unscaled = stage_and_step()

    for each, own in ((stage, step), (plain, unscaled)):
        saved, outputs = forward(each, own, leaf())
        each.backward(saved, [torch.zeros_like(outputs), *saved.loss_gradients])

    weight, other = stage.layers["a"].linear.weight, plain.layers["a"].linear.weight
    assert torch.equal(weight.grad, 8.0 * other.grad)
    assert torch.equal(step.named[MEAN][PLACE], unscaled.named[MEAN][PLACE])


@pytest.mark.parametrize("reason", ["no weight", "no gradients", "frozen"])
def test_what_is_not_trained_is_noted_alone(reason):
    stage, step = stage_and_step(rows=(1.0, 0.0) if reason == "no weight" else (0.75, 0.25))
    for layer in stage.layers.values():
        layer.requires_grad_(reason != "frozen")
    with torch.set_grad_enabled(reason != "no gradients"):
        inputs = values(1, 3, WIDTH)
        saved, _ = forward(stage, step, inputs)

    assert saved.loss_gradients == []
    assert len(saved.edges) == (reason == "no weight")
    assert set(step.named) == {SQUARES, MEAN, LossName(ALL_TOGETHER, True, torch.float32)}


def test_a_forward_that_adds_nothing_notes_nothing():
    step = stage_and_step()[1]
    stage = Stage(0, {"a": nn.Sequential(nn.Linear(WIDTH, WIDTH))})
    losses = StageWithLosses(stage, [AuxiliaryLoss("never")], PLACE, lambda: step)

    saved = losses.saving(stage.save)((), losses.running(stage.forward)((leaf(),), {}))

    assert (len(saved.edges), saved.loss_gradients, step.named) == (1, [], {})


def test_a_forward_that_fails_leaves_nothing_in_the_modules():
    stage, step = stage_and_step()
    losses = at_work(stage, step)

    def failing(inputs, keywords):
        stage.forward(inputs, keywords)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        losses.running(failing)((leaf(),), {})

    assert [module.take() for module in losses.modules] == [None] * 4


def test_a_last_stage_that_only_what_it_adds_can_train_is_no_mistake():
    stage, step = stage_and_step()
    silent = Stage(5, {"a": nn.Linear(WIDTH, WIDTH)})
    assert {index: len(found) for index, found in auxiliary_of([stage, silent]).items()} == {4: 4, 5: 0}
    losses = at_work(stage, step)
    losses.running(stage.forward)((leaf(),), {})

    saved = losses.saving(stage.save_loss)((), torch.tensor(1.0))

    assert (len(saved.edges), len(saved.loss_gradients)) == (1, 1)
    with pytest.raises(PipelineError, match="nothing would be trained"):
        silent.save_loss((), torch.tensor(1.0))
