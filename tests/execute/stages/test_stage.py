"""A stage has its layers under the names of the unsplit model."""

from torch import nn

from penstock.execute.stages.stage import Stage
from tests.support.local_pipelines import WIDTH


def test_a_parameter_that_is_used_twice_is_listed_once_under_its_first_name():
    shared = nn.Linear(WIDTH, WIDTH, bias=False)
    stage = Stage(0, {"a": shared, "b": nn.Sequential(shared)})

    assert [name for name, _ in stage.named_parameters()] == ["a.weight"]
