"""A stage runs forward and backward apart from its neighbours, and keeps only what its backward needs."""

import weakref

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.stages.stage import Stage
from tests.local_pipelines import WIDTH, block, float_layers, values


def leaf(seed=1, rows=3):
    return values(seed, rows, WIDTH).requires_grad_()


def test_a_stage_runs_its_layers_one_after_another():
    layers = float_layers(num_layers=3)
    stage = Stage(0, dict(zip("abc", layers, strict=True)))

    output = stage.forward((values(1, 3, WIDTH),), {})

    assert torch.equal(output, nn.Sequential(*layers)(values(1, 3, WIDTH)))


def test_a_backward_through_two_stages_is_the_backward_through_both():
    layers = float_layers(num_layers=2)
    first, second = Stage(0, {"0": layers[0]}), Stage(1, {"1": layers[1]})
    outer = leaf()
    outputs = first.forward((outer,), {})
    saved = first.save((outer,), outputs)
    inner = outputs.detach().requires_grad_()
    loss = second.forward((inner,), {}).square().mean()
    saved_loss = second.save_loss((inner,), loss)

    gradients = second.backward(saved_loss, saved_loss.loss_gradients)
    (found,) = first.backward(saved, gradients)

    gradients_found = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    alone = leaf()
    nn.Sequential(*layers)(alone).square().mean().backward()
    assert torch.equal(found, alone.grad)
    assert all(map(torch.equal, gradients_found, [p.grad for layer in layers for p in layer.parameters()]))
    assert inner.grad is None


def test_gradients_of_weights_add_up_over_backwards():
    stage = Stage(0, {"0": block(0)})

    for _ in range(2):
        loss = stage.forward((values(1, 3, WIDTH),), {}).sum()
        saved = stage.save_loss((), loss)
        stage.backward(saved, saved.loss_gradients)

    twice = {name: parameter.grad for name, parameter in stage.named_parameters()}
    alone = block(0)
    (2 * alone(values(1, 3, WIDTH)).sum()).backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(twice[f"0.{name}"], parameter.grad)


def test_an_input_that_took_no_part_gets_zeros():
    stage = Stage(0, {"0": First()})
    used, unused = leaf(1), leaf(2)
    saved = stage.save_loss(((used, unused),), stage.forward(((used, unused),), {}).sum())

    gradients = stage.backward(saved, saved.loss_gradients)

    assert [float(gradient.sum()) for gradient in gradients] == [used.numel(), 0.0]
    assert gradients[1].shape == unused.shape


class First(nn.Module):
    """Returns the first of a pair."""

    def forward(self, pair):
        return pair[0] * 1.0


def test_only_inputs_and_outputs_that_need_a_gradient_are_kept():
    stage = Stage(0, {"0": block(0)})
    tokens, hidden = torch.arange(3), leaf()
    outputs = stage.forward((hidden,), {})

    saved = stage.save((tokens, {"hidden": hidden, "none": None, "text": "x"}), (outputs, outputs > 0, 3))

    assert len(saved.inputs) == 1
    assert saved.inputs[0] is hidden
    assert len(saved.edges) == 1
    assert saved.loss_gradients == []


def test_without_a_loss_the_backward_gives_zeros_and_changes_no_weight():
    stage = Stage(0, {"0": block(0)})
    hidden = leaf()
    stage.forward((hidden,), {})
    saved = stage.save_loss((hidden,), None)

    (gradient,) = stage.backward(saved, saved.loss_gradients)

    assert torch.equal(gradient, torch.zeros_like(hidden))
    assert all(parameter.grad is None for _, parameter in stage.named_parameters())


def test_an_output_that_is_the_input_hands_its_gradient_through():
    stage = Stage(0, {"0": nn.Identity()})
    hidden = leaf()
    saved = stage.save((hidden,), stage.forward((hidden,), {}))

    (gradient,) = stage.backward(saved, [values(5, 3, WIDTH)])

    assert torch.equal(gradient, values(5, 3, WIDTH))


def test_the_output_itself_is_free_as_soon_as_its_holder_drops_it():
    stage = Stage(0, {"0": nn.Linear(WIDTH, WIDTH)})  # a linear layer's backward needs its input only
    hidden = leaf()
    output = stage.forward((hidden,), {})
    saved = stage.save((hidden,), output)
    watched = weakref.ref(output)

    del output

    assert watched() is None
    assert saved.edges


def test_a_parameter_that_is_used_twice_is_listed_once_under_its_first_name():
    shared = nn.Linear(WIDTH, WIDTH, bias=False)
    stage = Stage(0, {"a": shared, "b": nn.Sequential(shared)})

    assert [name for name, _ in stage.named_parameters()] == ["a.weight"]


@pytest.mark.parametrize("is_training", [True, False])
def test_training_mode_reaches_all_layers(is_training):
    stage = Stage(0, {"a": nn.Sequential(nn.Dropout()), "b": nn.Dropout()})

    stage.set_training(is_training)

    assert [m.training for layer in stage.layers.values() for m in layer.modules()] == [is_training] * 3


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [(nn.Linear(2, 2), []), (nn.Identity(), [torch.ones(1, requires_grad=True)])],
    ids=["parameters", "inputs"],
)
def test_a_loss_that_needs_no_gradient_is_an_error_where_there_is_something_to_train(layer, inputs):
    stage = Stage(3, {"last": layer})

    with pytest.raises(PipelineError, match="stage 3: its outputs need no gradient"):
        stage.save_loss(inputs, torch.ones(()))


def test_a_loss_that_needs_no_gradient_is_fine_where_there_is_nothing_to_train():
    stage = Stage(3, {"last": nn.Linear(2, 2).requires_grad_(False)})

    assert stage.save_loss([torch.ones(1)], torch.ones(())).edges == []


def test_a_whole_backward_beside_split_ones_is_searched_for_nothing():
    stage, alone = Stage(0, {"0": block(0)}), block(0)
    stage.is_split = True
    matrix = stage.layers["0"][1].weight
    known = []

    for is_whole in (True, False):
        loss = stage.forward((values(1, 3, WIDTH),), {}).sum()
        saved = stage.save_loss((), loss)
        if is_whole:
            stage.backward(saved, saved.loss_gradients)
        else:
            stage.backward_input(saved, saved.loss_gradients)
            stage.backward_weight(saved)
        known.append(stage.split_plan.stays_whole(matrix))
        alone(values(1, 3, WIDTH)).sum().backward()

    assert known == [False, True]
    for name, parameter in alone.named_parameters():
        assert torch.equal(dict(stage.named_parameters())[f"0.{name}"].grad, parameter.grad)
