"""Outputs go to the ranks that are named, such as those on which another pipeline takes them as its target."""

from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError, StepRefused
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    NEARLY,
    WIDTH,
    assert_errors,
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    on_ranks,
    outcome_of,
    square_loss,
    values,
)
from tests.support.mesh_pipelines import on_mesh
from tests.support.reference import reference_step

FLOAT64 = torch.float64
MICROBATCHES = 4


def expected_outputs(task):
    return torch.cat(task.reference(MICROBATCHES)[0].outputs)


@pytest.mark.feature("X25")
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "ranks"),
    [("1f1b", 3, (0,)), ("1f1b", 3, [2, 0, 0]), ("zbv", 2, {1}), ("dualpipe", 2, (0, 1)), ("dualpipe", 2, (0,))],
)
def test_outputs_go_to_the_ranks_that_are_named(schedule, num_ranks, ranks):
    task = float_task(8, FLOAT64)

    def case(pipeline):
        calls = (pipeline.step, pipeline.evaluate, pipeline.step)
        return [call(*task.inputs, target=task.target, return_outputs=ranks).outputs for call in calls]

    found = on_pipelines(num_ranks, task, case, schedule)

    expected = expected_outputs(task)
    for rank, outputs in enumerate(found):
        assert all(torch.equal(output, expected) if rank in ranks else output is None for output in outputs)


@pytest.mark.parametrize("options", [{"messages": "coalesced"}, {"messages": "rendezvous"}, {"debug": "messages"}])
def test_they_travel_like_all_messages(options):
    task = float_task(8, FLOAT64)

    def case(pipeline):
        return [pipeline.evaluate(*task.inputs, return_outputs=(0, 1)).outputs for _ in range(2)]

    for outputs in on_pipelines(3, task, case, **options)[:2]:
        assert all(torch.equal(output, expected_outputs(task)) for output in outputs)


def test_trees_arrive_as_they_are():
    class Named(torch.nn.Module):
        def forward(self, x):
            return {"hidden": x, "sums": (x.sum(1), "by row")}

    task = float_task(8, FLOAT64)
    task.make_layers = lambda: [*float_layers(FLOAT64, 4), Named()]

    sent, kept = on_pipelines(
        2,
        task,
        lambda own: own.evaluate(*task.inputs, return_outputs=(0, 1)).outputs,
        merge={"hidden": ps.Concat(), "sums": (ps.Concat(), list)},
    )

    assert torch.equal(sent["hidden"], kept["hidden"])
    assert torch.equal(sent["sums"][0], kept["sums"][0])
    assert sent["sums"][1] == kept["sums"][1] == ["by row"] * MICROBATCHES


def test_what_cannot_travel_is_told_as_an_output():
    class Wrapped(torch.nn.Module):
        def forward(self, x):
            return {"hidden": x, "kind": torch.float64}

    task = float_task(8, FLOAT64)
    task.make_layers = lambda: [*float_layers(FLOAT64, 4), Wrapped()]

    def case(pipeline):
        return error_of(pipeline.evaluate, *task.inputs, return_outputs=(0,))

    assert_errors(on_pipelines(2, task, case), PipelineError, "in the outputs for other ranks", "cannot travel")


# ---- a teacher and a student


def teacher_layers():
    return float_layers(FLOAT64, 4)


def student_layers():
    return list(reversed(float_layers(FLOAT64, 4)))


def distilled_loss(output, target):
    """Near to the teacher, and to the labels."""
    labels, teacher_output = target
    return square_loss(output, labels) + 0.5 * square_loss(output, teacher_output)


INPUTS, LABELS = (values(seed, 8, WIDTH, dtype=FLOAT64) for seed in (1, 2))


def alone():
    """What one process computes in two steps."""
    teacher, student = torch.nn.Sequential(*teacher_layers()), student_layers()
    with torch.no_grad():
        target = (LABELS, torch.cat([teacher(rows) for rows in INPUTS.split(2)]))
    for _ in range(2):
        result = reference_step(student, (INPUTS,), {}, target, loss=distilled_loss, num_microbatches=MICROBATCHES)
    named = torch.nn.Sequential(*student).named_parameters()
    return result, {name: parameter.grad for name, parameter in named}


def distill(teacher_schedule, student_schedule, rows=slice(None), **place):
    """Two steps of a student on the outputs of a teacher, which runs on the same ranks."""
    teacher = Pipeline(teacher_layers(), teacher_schedule, MICROBATCHES, **place)
    student = Pipeline(student_layers(), student_schedule, MICROBATCHES, distilled_loss, **place)
    inputs, labels = INPUTS[rows], LABELS[rows]
    for _ in range(2):
        outputs = teacher.evaluate(inputs, return_outputs=student.target_ranks).outputs
        assert (outputs is not None) == (student.rank in student.target_ranks)
        result = student.step(inputs, target=None if outputs is None else (labels, outputs))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    return outcome_of(student, result)


@pytest.mark.feature("X25")
@pytest.mark.parametrize(
    ("teacher", "student", "num_ranks", "tolerances"),
    [
        ("1f1b", "zb-h1", 2, {}),
        ("gpipe", "zbv", 2, {}),
        ("zbv", "1f1b", 2, {}),
        ("dualpipe", "zb-h1", 2, {}),
        ("1f1b", "dualpipe", 2, NEARLY),
        pytest.param("gpipe", "1f1b", 4, {}, marks=pytest.mark.slow),
        pytest.param("1f1b", "hanayo", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_a_student_learns_from_a_teacher_with_another_schedule(teacher, student, num_ranks, tolerances):
    outcomes = on_ranks(num_ranks, lambda wires: distill(teacher, student, transport=wires))

    assert difference(outcomes, alone(), **tolerances) == []


def test_replicas_of_teacher_and_student_are_one_job():
    outcomes = on_mesh(
        2, 2, lambda places: distill("1f1b", "zbv", slice(4 * places.replica, 4 * places.replica + 4), mesh=places)
    )

    result, gradients = alone()
    for outcome in outcomes:
        torch.testing.assert_close(outcome.result.loss, result.loss, rtol=1e-12, atol=1e-12)
    assert difference([replace(outcome, result=result) for outcome in outcomes], (result, gradients), **NEARLY) == []


def distill_on_gloo(rank, *schedules):
    return distill(*schedules)


@pytest.mark.slow
def test_a_student_learns_between_processes(two_ranks):
    outcomes = two_ranks.run(distill_on_gloo, "1f1b", "zbv")

    assert difference(outcomes, alone()) == []


# ---- what is refused


def refusals(*return_outputs):
    """What each rank says where it asks for outputs so; the next step is right."""
    task = float_task(8, FLOAT64)

    def case(pipeline):
        asked = return_outputs[pipeline.rank % len(return_outputs)]
        error = error_of(pipeline.step, *task.inputs, target=task.target, return_outputs=asked)
        return error, pipeline.evaluate(*task.inputs, return_outputs=(0,)).outputs

    found = on_pipelines(2, task, case)
    assert torch.equal(found[0][1], expected_outputs(task))
    return [error for error, _ in found]


@pytest.mark.parametrize("ranks", [(2,), (-1,), (True,), (0.5,), "last", ({},), 0, 1, 0.5, torch.tensor(1)])
def test_what_are_no_ranks_of_the_pipeline_is_refused_on_all(ranks):
    assert_errors(
        refusals(ranks), StepRefused, f"return_outputs is {ranks!r} of type", "True, False or ranks from 0 to 1"
    )


def test_ranks_that_name_others_are_refused():
    assert_errors(refusals((0,), True), StepRefused, "output_ranks", "Name the same ranks in return_outputs on every")
    assert_errors(refusals((0,), (1,)), StepRefused, "output_ranks", "Name the same ranks in return_outputs on every")


def test_a_rank_may_leave_it_to_the_others_to_name_ranks():
    task = float_task(8, FLOAT64)

    def case(pipeline):
        asked = (0,) if pipeline.rank else False
        return pipeline.evaluate(*task.inputs, return_outputs=asked).outputs

    first, last = on_pipelines(2, task, case)

    assert torch.equal(first, expected_outputs(task))
    assert last is None
