"""What a forward that runs again keeps, and what it may not do."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.stages.recompute import BufferCopier, Checkpoint, Recomputation, on_copied_buffers
from penstock.execute.stages.stage import Stage
from tests.support.local_pipelines import WIDTH, block, values
from tests.support.one_stage import PLACE, OneStage
from tests.support.using import Using


class Again(OneStage):
    """A stage whose forwards run again."""

    def __init__(self, stage, **options):
        super().__init__(stage, **options)
        self.recomputation = Recomputation(self.passes)

    def forward(self, *inputs, place=PLACE, **keywords):
        return self.recomputation.forward(self.step, place, inputs, keywords)

    def run_again(self, checkpoint):
        return self.recomputation.run_again(self.step, PLACE, checkpoint)


def test_nothing_but_the_arguments_is_kept():
    stage = Again(Stage(0, {"0": block(0)}))
    inputs = values(1, 4, WIDTH).requires_grad_()

    outputs, saved = stage.forward(inputs)

    assert outputs.requires_grad
    assert isinstance(saved, Checkpoint)
    assert saved.arguments[0] is inputs
    assert (saved.parts, saved.keywords) == ([], {})


def test_a_backward_within_the_first_forward_is_refused():
    stage = Again(Stage(0, {"0": Using(lambda self, x: (x**2).sum().backward() or x)}))

    with pytest.raises(PipelineError, match="take its stage out of the recomputation"):
        stage.forward(torch.ones(2, requires_grad=True))


def test_a_loss_may_run_a_backward_through_itself():
    def loss(output):
        scale = torch.ones((), requires_grad=True)
        return output.sum() + torch.autograd.grad((scale**2 * 3).sum(), scale)[0]

    stage = Again(Stage(0, {"0": block(0)}), loss=loss)

    assert isinstance(stage.saved(values(1, 4, WIDTH)), Checkpoint)


def test_copies_have_the_values_that_the_forward_began_with_and_are_shared_until_they_change():
    layer, other = nn.Module(), nn.Module()
    layer.register_buffer("count", torch.zeros(()))
    other.register_buffer("table", torch.arange(3))
    other.register_buffer("count", layer.count)
    copier = BufferCopier()
    first = copier.copies([layer, other])
    layer.count += 1
    second = copier.copies([layer, other])

    assert first[other, "table"] is second[other, "table"]
    for copies, count in ((first, 0), (second, 1)):
        with on_copied_buffers([layer, other], copies):
            assert layer.count == count
            assert layer.count is other.count
            layer.count += 5
    assert layer.count == 1
    assert second[layer, "count"].values == 1


def test_arguments_that_are_changed_before_the_forward_runs_again_are_refused():
    stage = Again(Stage(0, {"0": block(0)}))
    batch = values(1, 4, WIDTH)
    saved = stage.saved(batch)

    batch.mul_(2)

    with pytest.raises(PipelineError, match="was changed in place, so that its recomputation"):
        stage.run_again(saved)
