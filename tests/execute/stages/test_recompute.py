"""What a forward that runs again keeps, and what it may not do."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.stages.recompute import BufferCopier, Checkpoint, checkpoint_of, keep_arguments, on_copied_buffers
from penstock.execute.stages.stage import SavedForward, Stage
from tests.local_pipelines import WIDTH, block, values


def test_nothing_but_the_arguments_is_kept():
    stage = Stage(0, {"0": block(0)})
    run, save = keep_arguments(BufferCopier(stage), stage.forward, stage.save)
    inputs = (values(1, 4, WIDTH).requires_grad_(),)

    outputs = run(inputs, {})
    saved = save(inputs, outputs)

    assert outputs.requires_grad
    assert isinstance(saved, Checkpoint)
    assert saved.arguments is inputs
    assert (saved.inputs, saved.edges, saved.deferred) == ([], [], None)


def test_a_backward_within_the_first_forward_is_refused():
    class Greedy(nn.Module):
        def forward(self, x):
            (x**2).sum().backward()
            return x

    stage = Stage(0, {"0": Greedy()})
    run, _ = keep_arguments(BufferCopier(stage), stage.forward, stage.save)

    with pytest.raises(PipelineError, match="take its stage out of the recomputation"):
        run((torch.ones(2, requires_grad=True),), {})


def test_layers_change_copies_of_their_buffers():
    norm = nn.BatchNorm1d(WIDTH)
    stage, mean = Stage(0, {"0": norm}), norm.running_mean
    checkpoint = Checkpoint([], [], [], buffers=BufferCopier(stage).copies())

    with on_copied_buffers(stage, checkpoint):
        stage.forward((values(1, 4, WIDTH),), {})
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
    stage = Stage(0, {"0": block(0)})
    run, save = keep_arguments(BufferCopier(stage), stage.forward, stage.save)
    batch = values(1, 4, WIDTH)
    saved = save((), run((batch,), {}))
    assert checkpoint_of(saved, "0F0") is saved

    batch.mul_(2)

    with pytest.raises(PipelineError, match="was changed in place, so that its recomputation"):
        checkpoint_of(saved, "0F0")


def test_what_a_plain_forward_has_kept_is_no_checkpoint():
    with pytest.raises(PipelineError, match="0F0: its forward has kept no inputs"):
        checkpoint_of(SavedForward([], [], []), "0F0")
