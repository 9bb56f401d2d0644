"""Copies of parameters that drift apart are noticed: which, where, and by how much."""

import math

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.observing.copies import require_equal_copies
from tests.support.local_pipelines import error_of, float_layers, on_pipelines, step_task, token_task
from tests.support.mesh_pipelines import Job
from tests.support.mesh_pipelines import on_pipelines as on_mesh_pipelines

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


def parameter_at(pipeline, index):
    """The parameter of this place on the rank, as one row of elements."""
    return list(pipeline.parameters())[index].detach().view(-1)


@pytest.mark.feature("H10")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_replicas_are_compared_after_an_update_and_drift_is_an_error_on_all_ranks(schedule):
    def case(pipeline, inputs, target):
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
        for _ in range(2):
            pipeline.step(inputs, target=target)
            optimizer.step()
        pipeline.require_equal_copies()
        if (pipeline.rank, pipeline.replica) == (1, 2):
            parameter_at(pipeline, 1)[2:5] += torch.tensor([0.25, -0.75, 0.5])
        return error_of(pipeline.require_equal_copies), list(dict(pipeline.named_parameters()))[1]

    found = on_mesh_pipelines(Job([4, 8, 8]), schedule, case)

    name = found[1][1]
    for error, _ in found:
        assert isinstance(error, PipelineError)
        text = str(error)
        assert f"rank 1 (pipeline 1, data 0) holds {name!r}, and rank 5 (pipeline 1, data 2) its copy {name!r}" in text
        assert "whose values differ by up to 0.75, in 3 of " in text
        assert error.rank == 5


def test_a_square_weight_that_one_replica_holds_transposed_is_another_one():
    def case(pipeline, inputs, target):
        if pipeline.replica == 1 and pipeline.rank == 0:
            weight = dict(pipeline.named_parameters())["0.1.weight"].detach()
            weight.copy_(weight.t().clone())
        return error_of(pipeline.require_equal_copies)

    for error in on_mesh_pipelines(Job([8, 8], float_layers), "1f1b", case):
        assert "holds '0.1.weight'" in str(error)


@pytest.mark.feature("H10")
def test_of_shards_only_what_each_replica_has_whole_is_compared():
    def layers():
        made = Job([8, 8]).make_layers()
        for layer in made:
            layer.register_parameter("factor", torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
        return made

    def case(pipeline, inputs, target):
        pipeline.step(inputs, target=target)
        pipeline.require_equal_copies()  # the rows of replicas differ, and are no copies
        if pipeline.replica == 1 and pipeline.rank == 0:
            with torch.no_grad():
                dict(pipeline.named_parameters())["0.factor"].to_local().fill_(-1.5)
        return error_of(pipeline.require_equal_copies)

    for error in on_mesh_pipelines(Job([8, 8], layers), "1f1b", case, shard="full"):
        assert "holds '0.factor'" in str(error)
        assert "differ by up to 3.5, in 1 of 1 values" in str(error)


@pytest.mark.feature("H10")
def test_ties_are_compared_with_their_largest_difference_and_so_are_signs_of_zeros_and_no_numbers():
    task = token_task(8)

    def case(pipeline):
        parameter = dict(pipeline.named_parameters()).get("4.weight")
        changed = torch.zeros(0) if parameter is None else parameter.detach().view(-1)
        texts = []
        for value, is_changed_on_owner in ((math.nan, True), (-0.0, False), (3.0, False)):
            if is_changed_on_owner:
                for equal in pipeline.parameters():
                    equal.detach().view(-1)[:1] = math.nan
                pipeline.require_equal_copies()  # the same bits are equal, whatever they stand for
                for equal in pipeline.parameters():
                    equal.detach().view(-1)[:1] = 0.0
            changed[:1] = value
            texts.append(str(error_of(pipeline.require_equal_copies)))
        return texts

    for texts in on_pipelines(2, task, case, tied=TIED):
        sizes = ["differ by up to nan, in 1 of 66", "differ by up to 0, in 1 of 66", "differ by up to 3, in 1 of 66"]
        assert all(size in text for size, text in zip(sizes, texts, strict=True)), texts
