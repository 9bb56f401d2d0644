"""A stage has its layers under the names of the unsplit model."""

import pytest
from torch import nn

from penstock.execute.stages.stage import Stage
from tests.local_pipelines import WIDTH


def test_a_parameter_that_is_used_twice_is_listed_once_under_its_first_name():
    shared = nn.Linear(WIDTH, WIDTH, bias=False)
    stage = Stage(0, {"a": shared, "b": nn.Sequential(shared)})

    assert [name for name, _ in stage.named_parameters()] == ["a.weight"]


@pytest.mark.parametrize("is_training", [True, False])
def test_training_mode_reaches_all_layers(is_training):
    stage = Stage(0, {"a": nn.Sequential(nn.Dropout()), "b": nn.Dropout()})

    stage.set_training(is_training)

    assert [m.training for layer in stage.layers.values() for m in layer.modules()] == [is_training] * 3
