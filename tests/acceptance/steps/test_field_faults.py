"""What torch.distributed.pipelining 2.13 computes wrongly, accepts wrongly or hangs on, each done right here.

Faults of layers, losses and what crosses between stages are in `test_mistakes.py`, planted deaths and hangs in
`test_faults.py`.
"""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import FormatError, PipelineError, ScheduleError, StepRefused
from penstock.ir.schedule import Schedule
from penstock.pipeline import Pipeline
from tests.proofs.tables import schedule_of as drawn
from tests.support.actions import parse_action
from tests.support.local_pipelines import (
    WIDTH,
    Around,
    Outcome,
    Task,
    assert_errors,
    block,
    difference,
    error_of,
    float_layers,
    gradients_of,
    named,
    on_pipelines,
    on_ranks,
    outcome_of,
    settle,
    square_loss,
    step_task,
    token_task,
    two_steps,
    values,
    zero,
)
from tests.support.reference import reference_evaluate, reference_step

M = 4
FLOAT64 = torch.float64
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "zbv", "interleaved-1f1b"]


def task_of(rows, make_layers=lambda: float_layers(FLOAT64, 4)):
    inputs, target = (values(seed, rows, WIDTH, dtype=FLOAT64) for seed in (rows, rows + 1))
    return Task(make_layers, (inputs,), target)


# ---- wrong results without an error

CALLS = [("evaluate", 16), ("evaluate", 8), ("step", 16), ("step", 8), ("step", 24), ("evaluate", 4), ("step", 16)]


def changing_shapes(transport, schedule, **options):
    """Outcomes of calls of many sizes on one pipeline, each from zero gradients."""
    pipeline = Pipeline(float_layers(FLOAT64, 4), schedule, M, square_loss, transport=transport, **options)
    outcomes = []
    for call, rows in CALLS:
        task = task_of(rows)
        result = getattr(pipeline, call)(*task.inputs, target=task.target, return_outputs=True)
        outcomes.append(outcome_of(pipeline, result))
        zero(pipeline)
    pipeline.close()
    return outcomes


def differing_calls(answers):
    """The calls whose losses, outputs or gradients are not those of one process."""
    found = []
    for number, (call, rows) in enumerate(CALLS):
        task, layers = task_of(rows), float_layers(FLOAT64, 4)
        run = reference_step if call == "step" else reference_evaluate
        expected = run(layers, task.inputs, {}, task.target, loss=square_loss, num_microbatches=M)
        outcomes = [answer[number] for answer in answers]
        outputs = [each.result.outputs for each in outcomes if each.result.outputs is not None]
        is_same = [torch.equal(each, torch.cat(expected.outputs)) for each in outputs] == [True]
        if difference(outcomes, (expected, gradients_of(named(layers)))) or not is_same:
            found.append((number, call, rows))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variable_shapes", [False, True])
def test_a_batch_of_another_size_gives_its_own_rows_and_never_those_of_the_batch_before(schedule, variable_shapes):
    answers = on_ranks(2, lambda wires: changing_shapes(wires, schedule, variable_shapes=variable_shapes))

    assert differing_calls(answers) == []


def changing_shapes_on_gloo(rank):
    return changing_shapes(None, "1f1b", deadline_s=20.0)


@pytest.mark.slow
def test_a_growing_batch_does_not_abort_the_process_on_gloo(two_ranks):
    answers = two_ranks.run(changing_shapes_on_gloo)

    assert differing_calls(answers) == []


@pytest.mark.parametrize("rows", [6, 1])
def test_a_batch_that_does_not_divide_is_refused_with_the_numbers_and_not_filled_up(rows):
    task = task_of(rows)

    errors = on_pipelines(2, task, lambda pipeline: error_of(step_task, pipeline, task))

    assert_errors(errors, StepRefused, f"has {rows} row", "4 microbatches")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_ragged_batch_has_the_loss_and_the_gradients_of_the_whole(schedule):
    task = task_of(7)
    layers = task.make_layers()
    whole = square_loss(nn.Sequential(*layers)(*task.inputs), task.target)
    whole.backward()

    for outcome in on_pipelines(2, task, lambda own: step_task(own, task), schedule, M, allow_ragged=True):
        assert torch.allclose(outcome.result.loss, whole, rtol=1e-12)
        for name, parameter in named(layers):
            if name in outcome.gradients:
                assert torch.allclose(outcome.gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make_task", [lambda: task_of(8), lambda: token_task(9, FLOAT64)], ids=["mean", "tokens"])
def test_gradients_of_two_steps_add_up_and_none_is_scaled_twice(schedule, make_task):
    task = make_task()

    found = on_pipelines(2, task, lambda pipeline: two_steps(pipeline, task), schedule, M)

    assert difference(found, task.reference(M, num_steps=2)) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_whole_when_data_parallelism_is_called_split_backward_or_not(schedule):
    task = task_of(8)
    _, expected = task.reference(M)

    def case(wires):
        seen = {}
        stages = {}

        def reduce_stage(stage):
            seen.update(gradients_of(stages[stage].named_parameters()))

        options = {"transport": wires, "reduce_stage": reduce_stage}
        pipeline = Pipeline(task.make_layers(), schedule, M, square_loss, **options)
        stages.update({stage.index: stage for stage in pipeline.stages})
        step_task(pipeline, task)
        return seen

    found = {name: gradient for seen in on_ranks(2, case) for name, gradient in seen.items()}

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Scaled(nn.Module):
    """A layer with a weight that another one shares."""

    def __init__(self, shared=None):
        super().__init__()
        self.inner = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT64), 5) if shared is None else shared.inner

    def forward(self, value):
        return torch.tanh(self.inner(value))


def tied_layers():
    first = Scaled()
    return [first, block(1, FLOAT64), block(2, FLOAT64), Scaled(first)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_of_the_first_and_the_last_stage_gets_the_gradient_of_one_weight(schedule):
    _, expected = task_of(8, tied_layers).reference(M)
    tied = [("0.inner.weight", "3.inner.weight"), ("0.inner.bias", "3.inner.bias")]
    # Ranks that are processes hold copies of their own.
    task = task_of(8, lambda: [Scaled(), block(1, FLOAT64), block(2, FLOAT64), Scaled()])

    for outcome in on_pipelines(2, task, lambda own: step_task(own, task), schedule, M, tied=tied):
        for name, gradient in outcome.gradients.items():
            assert torch.allclose(gradient, expected[name.replace("3.inner", "0.inner")], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_running_statistics_and_calls_of_the_loss_count_each_microbatch_once(schedule):
    def make_layers():
        return [nn.BatchNorm1d(WIDTH, dtype=FLOAT64) for _ in range(4)]

    task = task_of(16, make_layers)
    layers = make_layers()
    reference_step(layers, task.inputs, {}, task.target, loss=square_loss, num_microbatches=M)
    expected = {f"{index}.{name}": b for index, layer in enumerate(layers) for name, b in layer.named_buffers()}

    def case(wires):
        calls = []

        def loss(output, target):
            calls.append(1)
            return square_loss(output, target)

        pipeline = Pipeline(make_layers(), schedule, M, loss, transport=wires)
        step_task(pipeline, task)
        named_layers = [pair for stage in pipeline.stages for pair in stage.layers.items()]
        return {f"{place}.{name}": b for place, layer in named_layers for name, b in layer.named_buffers()}, len(calls)

    answers = on_ranks(2, case)

    found = {name: buffer for buffers, _ in answers for name, buffer in buffers.items()}
    assert sum(num_calls for _, num_calls in answers) == M
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_losses_are_those_of_their_microbatches_in_whatever_order_the_last_stage_takes_them():
    schedule = drawn("0F1 0F0 0B1 0B0\n1F1 1F0 1B0 1B1")
    task = task_of(4)
    expected, _ = task.reference(2)

    for outcome in on_pipelines(2, task, lambda own: step_task(own, task), schedule, None):
        assert [float(loss) for loss in outcome.result.losses] == [float(loss) for loss in expected.losses]
        assert torch.equal(outcome.result.loss, expected.loss)


@pytest.mark.parametrize("text", ["2F0junk", "0F", "F0", "0B1.", "()OVERLAP_F_B", "-1OVERLAP_F_B", "0F0 0F1"])
def test_an_action_is_read_whole_or_refused(text):
    with pytest.raises(FormatError):
        parse_action(text)


# ---- schedules that cannot run


SOUND = "0F0,0SEND_F0,0RECV_B0,0B0\r\n1RECV_F0,1F0,1B0,1SEND_B0\r\n"


def test_a_program_is_not_taken_for_a_schedule():
    ps.check(ps.Program.from_csv(SOUND))
    with pytest.raises(FormatError, match="the text has communication; expected actions alone"):
        Schedule.from_csv(SOUND)


def test_an_error_in_a_large_schedule_shows_its_place_and_not_the_whole_grid():
    text = ps.build("1f1b", ranks=32, microbatches=64).to_csv().replace("0F17,", "", 1)

    with pytest.raises(ScheduleError, match="0B17 has no forward") as caught:
        ps.check(Schedule.from_csv(text))

    assert len(str(caught.value)) < 1000


# ---- ranks that were not started alike

LOOP = {"schedule": "interleaved-1f1b"}
DIFFERENT = {
    "microbatches": ({}, {"microbatches": 8}, ("microbatches=4", "microbatches=8")),
    "schedule": ({}, {"schedule": "gpipe"}, ("1f1b", "gpipe")),
    "option": ({}, {"warmup": "eager"}, ("rank 0 has Schedule('1f1b', ", "rank 1 has Schedule('1f1b', ")),
    "stages": (LOOP | {"stages_per_rank": 2}, LOOP | {"stages_per_rank": 1}, ("stages=4", "stages=2")),
}


def started_differently(transport, rank, case):
    options = {"schedule": "1f1b", "microbatches": M, "loss": square_loss} | DIFFERENT[case][rank]
    return error_of(Pipeline, float_layers(FLOAT64, 4), transport=transport, **options)


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_with_another_plan_are_found_at_the_start_with_both_values(case):
    for error in on_ranks(2, lambda wires: started_differently(wires, wires.rank, case)):
        assert type(error) is PipelineError
        assert "the ranks disagree on schedule" in str(error)
        assert all(value in str(error) for value in DIFFERENT[case][2])


class Breaking(Around):
    breaks = False

    def forward(self, value):
        if self.breaks:
            raise KeyError("planted")
        return self.inner(value)


def test_after_a_caught_failure_any_number_of_steps_and_evaluations_are_right():
    task = task_of(8, lambda: [Breaking(seed, FLOAT64) for seed in range(3)])

    def case(pipeline):
        outcomes, errors = [], []
        for number in range(4):
            for stage in pipeline.stages:
                for layer in stage.layers.values():
                    layer.breaks = number % 2 == 0 and stage.index == number
            if number % 2 == 0:
                errors.append(error_of(step_task, pipeline, task))
            zero(pipeline)
            if number % 2:
                outcomes.append(step_task(pipeline, task))
                outcomes.append(step_evaluated(pipeline, task, outcomes[-1]))
        return errors, outcomes

    answers = on_pipelines(3, task, case)

    assert all(isinstance(error, PipelineError) for errors, _ in answers for error in errors)
    for number in range(4):
        assert difference([outcomes[number] for _, outcomes in answers], task.reference(M)) == []


def step_evaluated(pipeline, task, outcome):
    """An evaluation, told like the step before it: the same losses, the gradients untouched."""
    result = pipeline.evaluate(*task.inputs, target=task.target)
    return Outcome(result, outcome.gradients)
