"""What a forward that runs again keeps, and what it may not do."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.stages.recompute import Checkpoint, checkpoint_of, keep_arguments, on_copied_buffers
from penstock.execute.stages.stage import SavedForward, Stage
from tests.local_pipelines import WIDTH, block, values


def test_nothing_but_the_arguments_is_kept():
    stage = Stage(0, {"0": block(0)})
    run, save = keep_arguments(stage, stage.forward, stage.save)
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
    run, _ = keep_arguments(stage, stage.forward, stage.save)

    with pytest.raises(PipelineError, match="take its stage out of the recomputation"):
        run((torch.ones(2, requires_grad=True),), {})


def test_layers_change_copies_of_their_buffers():
    norm = nn.BatchNorm1d(WIDTH)
    stage, mean = Stage(0, {"0": norm}), norm.running_mean

    with on_copied_buffers(stage):
        stage.forward((values(1, 4, WIDTH),), {})
        assert norm.running_mean.any()

    assert norm.running_mean is mean
    assert not mean.any()


def test_what_a_plain_forward_has_kept_is_no_checkpoint():
    with pytest.raises(PipelineError, match="0F0: its forward has kept no inputs"):
        checkpoint_of(SavedForward([], [], []), "0F0")
