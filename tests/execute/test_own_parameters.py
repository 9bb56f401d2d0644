"""Parameters that a caller replaces are trained rightly, or, where they are tied, refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, StepRefused
from penstock.execute.own_parameters import OwnParameters
from penstock.execute.stages.assemble import assemble
from penstock.placement import Placement
from tests.local_pipelines import (
    WIDTH,
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    settle,
    step_task,
    token_layers,
    token_task,
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_replaced_parameters_are_trained_like_those_before_them(schedule):
    task = float_task(8, FLOAT64)

    def case(pipeline):
        step_task(pipeline, task)
        reload_all(pipeline)
        return step_task(pipeline, task)

    assert not difference(on_pipelines(2, task, case, schedule), task.reference(4), tolerance=1e-12)


def test_replaced_parameters_get_main_gradients():
    task = float_task(8)

    def case(pipeline):
        step_task(pipeline, task)
        reload_all(pipeline)
        step_task(pipeline, task)
        return {name: (parameter.grad, parameter.main_grad) for name, parameter in pipeline.named_parameters()}

    expected = task.reference(4)[1]
    for found in on_pipelines(2, task, case, main_gradients=True):
        for name, (gradient, main) in found.items():
            assert gradient is None
            assert torch.equal(main, expected[name])


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


def test_evaluation_takes_replaced_parameters_as_they_are():
    task = tied_task()

    def case(pipeline):
        reload_all(pipeline)
        return pipeline.evaluate(*task.inputs, target=task.target).loss

    expected = task.reference(4)[0].loss
    assert [torch.equal(loss, expected) for loss in on_pipelines(2, task, case)] == [True, True]


def own_parameters(layers):
    placement = Placement.line(1)
    return OwnParameters(assemble(layers, placement, [range(len(layers))], 0, device=torch.device("cpu")))


def test_what_is_one_object_on_a_rank_may_be_replaced_by_one_object():
    first, second = (settle(nn.Linear(WIDTH, WIDTH), 1) for _ in range(2))
    second.weight = first.weight
    own = own_parameters([first, second])
    assert not own.refresh()

    first.weight = second.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    assert own.refresh()
    assert not own.refresh()
    assert own.named[0][1] is first.weight
    first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    error = error_of(own.refresh)
    assert isinstance(error, ConfigError)
    assert "'0.weight' is tied" in str(error)


def test_a_parameter_that_becomes_parametrized_is_noticed():
    layers = float_layers(num_layers=2)
    own = own_parameters(layers)

    nn.utils.parametrizations.weight_norm(layers[0][1])

    assert own.refresh()
    assert "0.1.parametrizations.weight.original0" in dict(own.named)
