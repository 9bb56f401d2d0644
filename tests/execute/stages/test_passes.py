"""A stage runs forward and backward apart from its neighbours, and keeps only what its backward needs."""

import weakref

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.execute.stages.stage import Stage
from tests.execute.ops.test_messages import frames_from_the_loop
from tests.support.local_pipelines import (
    WIDTH,
    block,
    float_task,
    on_ranks,
    pipeline_of,
    square_loss,
    step_task,
    values,
)
from tests.support.one_stage import OneStage
from tests.support.using import Using


def leaf(seed=1, rows=3):
    return values(seed, rows, WIDTH).requires_grad_()


def test_only_inputs_and_outputs_that_need_a_gradient_are_kept():
    def tree(self, state):
        output = self.inner(state["hidden"])
        return output, output > 0, 3

    hidden, layer = leaf(), Using(tree, inner=block(0))

    saved = OneStage(Stage(0, {"0": layer})).saved({"hidden": hidden, "tokens": torch.arange(3), "text": "x"})

    assert len(saved.inputs) == len(saved.edges) == 1
    assert saved.inputs[0] is hidden
    assert saved.loss_gradients == []


def test_without_a_loss_the_backward_gives_zeros_and_changes_no_weight():
    stage = OneStage(Stage(0, {"0": block(0)}), loss=torch.sum)
    stage.step.losses.loss = None
    hidden = leaf()

    (gradient,) = stage.backward(stage.saved(hidden))

    assert torch.equal(gradient, torch.zeros_like(hidden))
    assert all(parameter.grad is None for _, parameter in stage.stage.named_parameters())


@pytest.mark.feature("D2", "D3", "X16")
def test_the_output_itself_is_free_as_soon_as_its_holder_drops_it():
    # A linear layer's backward needs its input only.
    output, saved = OneStage(Stage(0, {"0": nn.Linear(WIDTH, WIDTH)})).forward(leaf())
    watched = weakref.ref(output)

    del output

    assert watched() is None
    assert saved.edges


def test_without_training_nothing_is_saved_and_the_loss_is_noted():
    stage = OneStage(Stage(0, {"0": nn.Identity()}), loss=torch.sum, is_training=False)

    with torch.no_grad():
        outputs, saved = stage.forward(torch.ones(3))

    assert saved is None
    assert torch.equal(outputs, torch.ones(3))
    assert float(stage.step.losses.computed[0, 0]) == 3.0


def test_a_loss_that_needs_no_gradient_is_fine_where_there_is_nothing_to_train():
    stage = OneStage(Stage(3, {"last": nn.Linear(2, 2).requires_grad_(False)}), loss=torch.sum)

    assert stage.saved(torch.ones(2)).edges == []


def test_a_whole_backward_beside_split_ones_is_searched_for_nothing():
    alone = block(0)
    stage = OneStage(Stage(0, {"0": block(0)}), loss=torch.sum, is_split=True)
    matrix = stage.stage.layers["0"][1].weight
    known = []

    for is_whole in (True, False):
        saved = stage.saved(values(1, 3, WIDTH))
        if is_whole:
            stage.backward(saved)
        else:
            stage.backward_input(saved)
            stage.backward_weight(saved)
        known.append(stage.stage.split_planner.is_small(matrix))
        alone(values(1, 3, WIDTH)).sum().backward()

    assert known == [False, True]
    for name, parameter in alone.named_parameters():
        assert torch.equal(dict(stage.stage.named_parameters())[f"0.{name}"].grad, parameter.grad)


MAX_FRAMES = 7


def test_a_stage_without_features_is_a_few_frames_from_the_loop():
    def case(wires):
        task, seen = float_task(4), []
        pipeline = pipeline_of(wires, task, "1f1b", 2)
        for layer in pipeline.stages[0].layers.values():
            layer.register_forward_pre_hook(lambda *_: seen.append(frames_from_the_loop()))
        step_task(pipeline, task)
        return seen, len(pipeline.stages[0].layers)

    for seen, num_layers in on_ranks(2, case):
        assert len(seen) == 2 * num_layers
        assert 0 < max(seen) <= MAX_FRAMES


class Told(nn.Linear):
    """A layer that notes when steps begin and end, and its forwards in between."""

    def begin_step(self):
        self.notes = [*getattr(self, "notes", []), "begin"]

    def end_step(self):
        self.notes.append("end")

    def forward(self, hidden):
        self.notes.append("forward")
        return super().forward(hidden)


def test_layers_are_told_where_steps_of_training_and_evaluation_begin_and_end():
    layer = Told(WIDTH, WIDTH)
    pipeline = ps.Pipeline([layer], "1f1b", 2, square_loss, ranks=1)
    pipeline.step(values(1, 2, WIDTH), target=values(2, 2, WIDTH))
    pipeline.evaluate(values(1, 2, WIDTH), target=values(2, 2, WIDTH))
    assert layer.notes == ["begin", "forward", "forward", "end"] * 2


def test_layers_are_told_of_the_end_of_a_step_that_fails():
    class Failing(Told):
        def forward(self, hidden):
            raise RuntimeError("on purpose")

    layer = Failing(WIDTH, WIDTH)
    pipeline = ps.Pipeline([layer], "1f1b", 2, square_loss, ranks=1)
    with pytest.raises(ps.PipelineError):
        pipeline.step(values(1, 2, WIDTH), target=values(2, 2, WIDTH))
    assert layer.notes == ["begin", "end"]
