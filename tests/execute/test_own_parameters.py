"""Parameters that a caller replaces are trained rightly, or, where they are tied, refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, StepRefused
from penstock.execute.own_parameters import OwnParameters
from penstock.execute.stages.assemble import assemble
from penstock.placement import Placement
from tests.support.local_pipelines import (
    NEARLY,
    WIDTH,
    assert_errors,
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    settle,
    step_task,
    token_layers,
    token_task,
    zero,
)

FLOAT64 = torch.float64


def tied_task():
    def tied_layers():
        layers = token_layers(FLOAT64)
        layers[-1].weight = layers[0].weight
        return layers

    return replace(token_task(8, FLOAT64), make_layers=tied_layers)


def reload(module):
    """Replace all parameters by equal ones, as loading a checkpoint without copying it does."""
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def reload_all(pipeline):
    for stage in pipeline.stages:
        for layer in stage.layers.values():
            reload(layer)


@pytest.mark.parametrize(
    ("schedule", "main_gradients"), [("1f1b", False), ("1f1b", True), ("zb-h1", False), ("zbv", False)]
)
def test_replaced_parameters_are_evaluated_and_trained_like_those_before_them(schedule, main_gradients):
    task = float_task(8, FLOAT64)
    result, gradients = task.reference(4)

    def case(pipeline):
        step_task(pipeline, task)
        reload_all(pipeline)
        loss = pipeline.evaluate(*task.inputs, target=task.target).loss
        outcome = step_task(pipeline, task)
        if main_gradients:
            assert outcome.gradients == dict.fromkeys(outcome.gradients)
            outcome.gradients = {name: parameter.main_grad for name, parameter in pipeline.named_parameters()}
        return loss, outcome

    found = on_pipelines(2, task, case, schedule, main_gradients=main_gradients)
    assert all(torch.equal(loss, result.loss) for loss, _ in found)
    assert not difference([outcome for _, outcome in found], (result, gradients), tolerance=1e-12)


@pytest.mark.parametrize(
    ("schedule", "replaced"), [("1f1b", 0), ("1f1b", 1), ("zbv", 0), ("dualpipe", 0)], ids=lambda each: str(each)
)
def test_a_tied_parameter_that_was_replaced_is_refused_on_every_rank(schedule, replaced):
    task = tied_task()

    def case(pipeline):
        step_task(pipeline, task)
        if pipeline.rank == replaced:
            reload_all(pipeline)
        return error_of(step_task, pipeline, task)

    for error in on_pipelines(2, task, case, schedule):
        assert isinstance(error, StepRefused)
        assert error.rank == replaced
        assert "is tied, but was replaced by another parameter after the pipeline was made" in str(error)


def swap(layer):
    """Put another module into the place of the one that holds the tied parameter."""
    layer[0] = settle(type(layer[0])(*layer[0].weight.shape, dtype=FLOAT64), 7)


def wrap(layer):
    """Put a module around the one that holds the tied parameter, which gives it another name."""
    layer[0] = nn.Sequential(layer[0])


def add_layer(pipeline):
    for stage in pipeline.stages:
        for layer in stage.layers.values():
            layer.append(settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT64), 7))


def test_a_parameter_that_is_added_to_a_layer_is_trained_or_refused_where_another_rank_has_a_copy_of_the_layer():
    task = float_task(8, FLOAT64)

    def more_layers():
        return [layer.append(settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT64), 7)) for layer in task.make_layers()]

    def case(pipeline):
        add_layer(pipeline)
        return step_task(pipeline, task)

    def case_with_copies(pipeline):
        step_task(pipeline, task)
        add_layer(pipeline)
        return error_of(step_task, pipeline, task)

    expected = replace(task, make_layers=more_layers).reference(4)
    assert not difference(on_pipelines(2, task, case, "zb-h1"), expected, **NEARLY)
    errors = on_pipelines(2, task, case_with_copies, "dualpipe")
    added = ".3.weight' was added after the pipeline was made, to a layer of which another rank holds"
    assert_errors(errors, StepRefused, added)


def tied_in_modules():
    embedding, *blocks, _ = token_layers(FLOAT64)
    head = nn.Linear(WIDTH, embedding.num_embeddings, bias=False, dtype=FLOAT64)
    head.weight = embedding.weight
    return [nn.Sequential(embedding), *blocks, nn.Sequential(head)]


def change_and_step(pipeline, task, change, index):
    """Take a step, change a layer of the model where it is, and return the outcome of another step, or its error."""
    step_task(pipeline, task)
    zero(pipeline)
    for stage in pipeline.stages:
        if str(index) in stage.layers:
            change(stage.layers[str(index)])
    try:
        return step_task(pipeline, task), pipeline.clip_grad_norm_(math.inf)
    except StepRefused as error:
        return error


@pytest.mark.parametrize(
    ("change", "index", "num_ranks", "what"),
    [
        (swap, 0, 2, "was replaced by another parameter"),
        (swap, 0, 1, "was replaced by another parameter"),
        (wrap, 4, 2, "got another name"),
    ],
)
def test_a_tied_parameter_whose_module_was_swapped_or_wrapped_is_refused(change, index, num_ranks, what):
    task = replace(token_task(8, FLOAT64), make_layers=tied_in_modules)
    for error in on_pipelines(num_ranks, task, lambda pipeline: change_and_step(pipeline, task, change, index)):
        assert isinstance(error, StepRefused)
        assert f".0.weight' is tied, but {what} after the pipeline was made" in str(error)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_module_may_be_put_around_the_owner_of_a_tied_parameter(num_ranks):
    task = replace(token_task(8, FLOAT64), make_layers=tied_in_modules)
    result, gradients = task.reference(4)
    norm = torch.stack([each.norm() for name, each in gradients.items() if name != "4.0.weight"]).norm()
    gradients["0.0.0.weight"] = gradients["0.0.weight"]
    for outcome, total in on_pipelines(num_ranks, task, lambda pipeline: change_and_step(pipeline, task, wrap, 0)):
        torch.testing.assert_close(outcome.result.loss, result.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(total, norm, rtol=1e-12, atol=1e-12)
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12)


def own_parameters(layers):
    return OwnParameters(assemble(layers, Placement.line(1), [range(len(layers))], 0, device=torch.device("cpu")))


def test_what_is_one_object_on_a_rank_may_be_replaced_by_one_object():
    first, second = (settle(nn.Linear(WIDTH, WIDTH), 1) for _ in range(2))
    second.weight = first.weight
    own = own_parameters([first, second])
    assert not own.refresh()

    first.weight = second.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    assert own.refresh()
    assert not own.refresh()
    assert own.named_parameters[0][1] is first.weight
    first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    assert_errors([error_of(own.refresh)], ConfigError, "'0.weight' is tied")


def test_a_parameter_that_becomes_parametrized_is_noticed():
    layers = float_layers(num_layers=2)
    own = own_parameters(layers)

    nn.utils.parametrizations.weight_norm(layers[0][1])

    assert own.refresh()
    assert "0.1.parametrizations.weight.original0" in dict(own.named_parameters)
