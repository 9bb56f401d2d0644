"""What a forward that runs again keeps, and what it may not do."""

from functools import partial

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.stages.passes import StagePasses
from penstock.execute.stages.recompute import (
    BufferCopier,
    Checkpoint,
    RecomputedPasses,
    on_copied_buffers,
)
from penstock.execute.stages.stage import Stage
from tests.local_pipelines import WIDTH, block, values
from tests.one_stage import PLACE, OneStage

AGAIN = partial(RecomputedPasses, again={PLACE})


def test_nothing_but_the_arguments_is_kept():
    stage = OneStage(Stage(0, {"0": block(0)}), kind=AGAIN)
    inputs = values(1, 4, WIDTH).requires_grad_()

    outputs, saved = stage.forward(inputs)

    assert outputs.requires_grad
    assert isinstance(saved, Checkpoint)
    assert saved.arguments[0] is inputs
    assert (saved.inputs, saved.edges, saved.deferred) == ([], [], None)


def test_a_backward_within_the_first_forward_is_refused():
    class Greedy(nn.Module):
        def forward(self, x):
            (x**2).sum().backward()
            return x

    stage = OneStage(Stage(0, {"0": Greedy()}), kind=AGAIN)

    with pytest.raises(PipelineError, match="take its stage out of the recomputation"):
        stage.forward(torch.ones(2, requires_grad=True))


def test_a_loss_may_run_a_backward_through_itself():
    def loss(output):
        scale = torch.ones((), requires_grad=True)
        return output.sum() + torch.autograd.grad((scale**2 * 3).sum(), scale)[0]

    stage = OneStage(Stage(0, {"0": block(0)}), kind=AGAIN, loss=loss)

    assert isinstance(stage.saved(values(1, 4, WIDTH)), Checkpoint)


def test_the_second_forward_saves_what_the_first_one_would_have_and_notes_nothing():
    kinds = StagePasses, AGAIN
    plain, stage = (OneStage(Stage(0, {"0": block(0)}), kind=kind, loss=torch.sum) for kind in kinds)
    inputs = [values(1, 4, WIDTH).requires_grad_() for _ in range(2)]
    expected = plain.backward(plain.saved(inputs[0]))
    checkpoint = stage.saved(inputs[1])
    stage.step.losses.computed.clear()

    found = stage.backward(stage.passes.recompute(stage.step, PLACE, checkpoint))

    assert torch.equal(found[0], expected[0])
    assert stage.step.losses.computed == {}
    pairs = zip(stage.stage.named_parameters(), plain.stage.named_parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for (_, one), (_, other) in pairs)


def test_layers_change_copies_of_their_buffers():
    norm = nn.BatchNorm1d(WIDTH)
    stage, mean = Stage(0, {"0": norm}), norm.running_mean
    checkpoint = Checkpoint([], [], [], buffers=BufferCopier(stage).copies())

    with on_copied_buffers(stage, checkpoint):
        norm(values(1, 4, WIDTH))
        assert norm.running_mean.any()

    assert norm.running_mean is mean
    assert not mean.any()


def test_copies_have_the_values_that_the_forward_began_with_and_are_shared_until_they_change():
    layer, other = nn.Module(), nn.Module()
    layer.register_buffer("count", torch.zeros(()))
    other.register_buffer("table", torch.arange(3))
    other.register_buffer("count", layer.count)
    stage = Stage(0, {"0": layer, "1": other})
    copier = BufferCopier(stage)
    first = copier.copies()
    layer.count += 1
    second = copier.copies()

    assert first[other, "table"] is second[other, "table"]
    for copies, count in ((first, 0), (second, 1)):
        with on_copied_buffers(stage, Checkpoint([], [], [], buffers=copies)):
            assert layer.count == count
            assert layer.count is other.count
            layer.count += 5
    assert layer.count == 1
    assert second[layer, "count"].values == 1


def test_arguments_that_are_changed_before_the_forward_runs_again_are_refused():
    stage = OneStage(Stage(0, {"0": block(0)}), kind=AGAIN)
    batch = values(1, 4, WIDTH)
    saved = stage.saved(batch)

    batch.mul_(2)

    with pytest.raises(PipelineError, match="was changed in place, so that its recomputation"):
        stage.passes.recompute(stage.step, PLACE, saved)


def test_a_forward_of_the_stage_that_does_not_run_again_keeps_its_activation():
    stage = OneStage(Stage(0, {"0": block(0)}), kind=AGAIN)

    saved = stage.saved(values(1, 4, WIDTH), place=(0, 1))

    assert not isinstance(saved, Checkpoint)
    assert len(saved.edges) == 1
