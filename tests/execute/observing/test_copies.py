"""Copies of parameters that drift apart are noticed: which, where, and by how much."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.observing.copies import require_equal_copies
from tests.support.local_pipelines import error_of, on_pipelines, step_task, token_task

TIED = [("0.weight", "4.weight")]


@pytest.mark.feature("H10")
@pytest.mark.parametrize(
    ("schedule", "options", "name"), [("1f1b", {"tied": TIED}, "4.weight"), ("dualpipe", {}, "2.1.bias")]
)
def test_injected_drift_names_the_parameter_the_ranks_and_the_largest_difference(schedule, options, name):
    task = token_task(8)

    def case(pipeline):
        step_task(pipeline, task)
        with torch.no_grad():  # equal copies pass in training and evaluation
            for parameter in pipeline.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        step_task(pipeline, task)
        pipeline.evaluate(*task.inputs, target=task.target)
        if pipeline.rank == 1:
            with torch.no_grad():
                parameter = dict(pipeline.named_parameters())[name].view(-1)
                parameter[0] = parameter[2] = 0.0
                parameter[2] += 0.5
        step_task(pipeline, task)

    error = error_of(on_pipelines, 2, task, case, schedule, debug="values", **options)

    assert isinstance(error, PipelineError)
    assert f"the copies of parameter {name!r} on ranks 0 and 1 differ by up to" in str(error)
    assert "in 2 of" in str(error)


@pytest.mark.feature("H10")
@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
def test_gradients_of_copies_are_compared_too_and_none_counts_as_zero(attribute):
    task, options = token_task(8), {"main_gradients": attribute == "main_grad"}

    def case(pipeline):
        wires, copies = pipeline.transport, pipeline._assembly.tied_copies
        require_equal_copies(wires, copies, attribute)
        parameter = next(iter(copies[0].parameters.values()))
        setattr(parameter, attribute, torch.zeros_like(parameter))
        if wires.rank == 1:
            getattr(parameter, attribute)[1, 2] = -3.0
        require_equal_copies(wires, copies)
        require_equal_copies(wires, copies, attribute)

    error = error_of(on_pipelines, 2, task, case, debug="values", tied=TIED, **options)

    text = "the copies of the gradient of '4.weight' on ranks 0 and 1 differ by up to 3, in 1 of 66 values"
    assert text in str(error)
    assert (error.rank, error.peer) == (1, 0)
