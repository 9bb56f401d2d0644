"""Promises that span several rooms: merging, ready-made parts, frozen and cut stages, mixes of calls, other orders."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PipelineError, StepRefused
from penstock.execute.batch.microbatch import PreSplit, Stack, Sum
from penstock.ir.instruction import Op
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.planning import plan
from penstock.schedules import build
from penstock.simulation import Costs
from tests.acceptance.replicas.test_replicas import Counting
from tests.proofs.tables import schedule_of as drawn
from tests.support.local_pipelines import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    Around,
    Task,
    assert_errors,
    block,
    count_tokens,
    difference,
    differences_on_gloo,
    error_of,
    errors_before_a_right_step,
    float_layers,
    float_task,
    gradients_of,
    named,
    on_pipelines,
    on_ranks,
    second_step,
    square_loss,
    step_task,
    token_layers,
    token_loss,
    values,
    zero,
)
from tests.support.reference import reference_evaluate, reference_step

# ---- outputs


def largest(parts):
    return max(float(part.max()) for part in parts)


@pytest.mark.feature("A7")
@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (Stack(), torch.stack),
        (Stack(1), partial(torch.stack, dim=1)),
        (Sum(), lambda parts: parts[0] + parts[1] + parts[2] + parts[3]),
        (largest, lambda parts: torch.tensor(largest(parts))),
        (list, torch.stack),
    ],
    ids=["stack", "stack on dim 1", "sum", "own rule", "list"],
)
def test_a_pipeline_merges_its_outputs_by_the_rule_it_was_given(merge, expected):
    task = float_task(8)

    def outputs(pipeline):
        calls = (pipeline.step, pipeline.evaluate)
        return [call(*task.inputs, target=task.target, return_outputs=True).outputs for call in calls]

    first, last = on_pipelines(2, task, outputs, merge=merge)

    assert first == [None, None]
    for outputs_of_call in last:
        found = torch.stack(outputs_of_call) if merge is list else torch.as_tensor(outputs_of_call)
        assert torch.equal(found, expected(task.reference(4)[0].outputs))


def refusing_rule(parts):
    raise KeyError("logits")


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "merge"),
    [
        ("gpipe", 1, refusing_rule),
        ("1f1b", 2, Stack(9)),
        ("interleaved-1f1b", 2, refusing_rule),
        ("zb-h1", 2, refusing_rule),
        ("zbv", 2, Stack(9)),
        ("dualpipe-v", 1, Stack(9)),
    ],
)
def test_outputs_that_cannot_be_merged_fail_the_step_on_all_ranks(schedule, num_ranks, merge):
    """With the documented loop an error on one rank alone is half an update: the others go on to their optimizers."""
    task = float_task(8)

    def case(pipeline):
        error = error_of(pipeline.step, *task.inputs, target=task.target, return_outputs=True)
        zero(pipeline)
        result = pipeline.step(*task.inputs, target=task.target)
        return error, pipeline.step_number, result.loss, gradients_of(pipeline.named_parameters())

    found = on_pipelines(num_ranks, task, case, schedule, merge=merge)
    output_rank = build(schedule, ranks=num_ranks, microbatches=4).placement.rank_of_stage[-1]
    result, gradients = task.reference(4)

    assert all(isinstance(error, PipelineError) and error.rank == output_rank for error, *_ in found)
    assert "in the merge of the outputs" in str(found[output_rank][0])
    for _, step_number, loss, own in found:
        assert step_number == 1  # the failed step does not count on any rank
        assert torch.equal(loss, result.loss)
        assert all(torch.allclose(own[name], gradients[name]) for name in own)


# ---- parts that the caller made


def packed_task(shapes):
    """One part of tokens and one of targets per shape [rows, length]; some targets do not count."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes]
    target = [torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes]
    for part in target:
        part[0, 1:] = IGNORED
    make_layers = partial(token_layers, torch.float64)
    return Task(make_layers, (PreSplit(tokens),), PreSplit(target), token_loss, {"count": count_tokens})


LENGTHS = [[(2, 5), (2, 3), (2, 8), (2, 1)], [(2, 2), (2, 9), (2, 4), (2, 4)], [(3, 4), (1, 7), (2, 2), (5, 1)]]


@pytest.mark.feature("X12")
@pytest.mark.parametrize("variable_shapes", [False, True])
def test_microbatches_may_have_sequences_of_other_lengths_bit_for_bit(variable_shapes):
    tasks = [packed_task(shapes) for shapes in (*LENGTHS, LENGTHS[0])]  # the last one meets shapes that are known

    def steps(pipeline):
        found = []
        for task in tasks:
            zero(pipeline)
            found.append(step_task(pipeline, task))
        return found

    per_rank = on_pipelines(3, tasks[0], steps, merge=list, variable_shapes=variable_shapes)

    for task, outcomes in zip(tasks, zip(*per_rank, strict=True), strict=True):
        assert difference(outcomes, task.reference(4)) == []
    lengths = [output.shape[:2] for output in per_rank[2][0].result.outputs]
    assert lengths == LENGTHS[0]


@pytest.mark.feature("0.7", "A3", "G6")
@pytest.mark.parametrize(("place", "num_parts"), [("args[0]", 3), ("target", 5)])
def test_too_few_or_too_many_parts_are_refused_on_every_rank_with_the_counts_and_do_no_harm(place, num_parts):
    task = packed_task(LENGTHS[0])
    wrong = packed_task([(2, 3)] * num_parts)
    inputs, target = (wrong.inputs, task.target) if place == "args[0]" else (task.inputs, wrong.target)

    errors = errors_before_a_right_step(2, task, lambda own: own.step(*inputs, target=target), merge=list)

    assert_errors(errors, StepRefused, f"{place}: PreSplit holds {num_parts} parts for 4 microbatches")


# ---- where gradients end


@pytest.mark.feature("X2")
@pytest.mark.parametrize("num_frozen", [0, 2])
def test_nothing_is_sent_below_a_frozen_stage(num_frozen):
    task = float_task(8)

    def make_layers():
        layers = float_layers(num_layers=4)
        for layer in layers[:num_frozen]:
            layer.requires_grad_(False)
        return layers

    def case(wires):
        counting = Counting(wires)
        pipeline = Pipeline(make_layers(), "1f1b", 4, task.loss, transport=wires)
        step_task(pipeline, task)  # the first step sends headers as well
        counting.data.clear()
        step_task(pipeline, task)
        return Counter(peer for peer, _ in counting.data)

    sent = on_ranks(4, case)

    assert [found[rank + 1] for rank, found in enumerate(sent)] == [4, 4, 4, 0]
    assert [found[rank] for rank, found in enumerate(sent[1:])] == [4 * (rank >= num_frozen) for rank in range(3)]


class Cutting(Around):
    """Cuts the gradient of every second microbatch, that of its own weight too."""

    cuts = True

    def forward(self, x):
        self.cuts = not self.cuts
        return self.run(x)

    def run(self, x):
        return self.inner(x).detach() if self.cuts else self.inner(x)


class CuttingBelow(Cutting):
    """Cuts below its own weight: its output needs a gradient, its input gets none."""

    def run(self, x):
        return self.inner(x.detach() if self.cuts else x)


def cut_task(cutting, place):
    def make_layers():
        return [(cutting if seed == place else block)(seed, torch.float64) for seed in range(4)]

    inputs, target = values(1, 8, WIDTH, dtype=torch.float64), values(2, 8, WIDTH, dtype=torch.float64)
    return Task(make_layers, (inputs,), target)


@pytest.mark.feature("X24")
@pytest.mark.parametrize(
    ("cutting", "place", "schedule"),
    [(Cutting, 0, "gpipe"), (Cutting, 2, "1f1b"), (CuttingBelow, 1, "1f1b"), (CuttingBelow, 3, "gpipe")],
)
def test_microbatches_may_differ_in_whether_an_output_needs_a_gradient(cutting, place, schedule):
    task = cut_task(cutting, place)

    outcomes = on_pipelines(4, task, lambda pipeline: second_step(pipeline, task), schedule)

    assert difference(outcomes, task.reference(4)) == []


@pytest.mark.parametrize("variable_shapes", [False, True])
def test_microbatches_that_change_places_in_the_next_step_are_right_or_a_clear_error(variable_shapes):
    task = cut_task(Cutting, 1)
    layers = task.make_layers()

    def case(pipeline):
        step_task(pipeline, task)
        for stage in pipeline.stages:
            stage.layers.get("1", nn.Identity()).cuts = False
        zero(pipeline)
        return step_task(pipeline, task) if variable_shapes else error_of(step_task, pipeline, task)

    found = on_pipelines(3, task, case, split=[1, 1, 2], variable_shapes=variable_shapes)

    layers[1].cuts = False
    result = reference_step(layers, task.inputs, {}, task.target, loss=task.loss, num_microbatches=4)
    if variable_shapes:
        assert difference(found, (result, gradients_of(named(layers)))) == []
    else:
        assert_errors(found, PipelineError, "1F0: the output is")
        assert "variable_shapes=True" in str(found[1])


# ---- calls


class Switching(Around):
    """Behaves differently in training and in evaluation, without chance."""

    def forward(self, x):
        return self.inner(x) * (2.0 if self.training else 1.0)


def switching_layers():
    return [Switching(seed, torch.float64) for seed in range(4)]


def descend(named_parameters):
    """Take one step of plain gradient descent."""
    with torch.no_grad():
        for _, parameter in named_parameters:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def mixed_calls(mix, step, evaluate, parameters):
    """Train on T and evaluate on E, each call with a batch of its own and every third one of another size."""
    losses = []
    for number, letter in enumerate(mix):
        rows = 4 if number % 3 == 2 else 8
        batch, target = (values(seed, rows, WIDTH, dtype=torch.float64) for seed in (number, number + 50))
        losses.append((step if letter == "T" else evaluate)(batch, target))
        if letter == "T":
            descend(parameters)
    return losses


@pytest.mark.feature("B10", "X31")
@pytest.mark.parametrize(("mix", "schedule"), [("TETETE", "1f1b"), ("EETTET", "gpipe"), ("EEETTT", "1f1b")])
def test_training_and_evaluation_may_alternate_in_any_mix(mix, schedule):
    def case(pipeline):
        return mixed_calls(
            mix,
            lambda batch, target: pipeline.step(batch, target=target).loss,
            lambda batch, target: pipeline.evaluate(batch, target=target).loss,
            list(pipeline.named_parameters()),
        )

    found = on_pipelines(2, Task(switching_layers, (), None), case, schedule)

    layers = switching_layers()

    def alone(call, is_training, batch, target):
        for layer in layers:
            layer.train(is_training)
        return call(layers, (batch,), {}, target, loss=square_loss, num_microbatches=4).loss

    expected = mixed_calls(
        mix, partial(alone, reference_step, True), partial(alone, reference_evaluate, False), named(layers)
    )
    assert found == [expected, expected]


# ---- set-up


@pytest.mark.feature("0.7")
def test_a_number_of_microbatches_must_be_that_of_a_schedule_given_whole():
    schedule = build("1f1b", ranks=1, microbatches=4)

    error = error_of(Pipeline, float_layers(), schedule, 8, square_loss)

    assert type(error) is ConfigError
    assert "8, but 1f1b is for 4 microbatches" in str(error)
    assert Pipeline(float_layers(), schedule, 4, square_loss).schedule is schedule
    assert Pipeline(float_layers(), schedule, loss=square_loss).program.num_microbatches == 4
    assert Pipeline(float_layers(), "1f1b", loss=square_loss).schedule.num_microbatches == 8


@pytest.mark.feature("X15")
def test_split_and_weights_together_are_refused():
    error = error_of(Pipeline, float_layers(), "1f1b", 4, square_loss, split=[5], weights=[1.0] * 5)

    assert type(error) is ConfigError
    assert "weights: " in str(error)
    assert "split" in str(error)


@pytest.mark.feature("F4")
def test_every_rank_can_draw_the_whole_split():
    def case(wires):
        # A rank builds its own layers only; what the others hold it must have been told.
        layers = [*(partial(block, seed) for seed in range(3)), last_layer]
        return Pipeline(layers, "1f1b", 4, square_loss, transport=wires, weights=[1, 1, 1, 3]).describe_split()

    def last_layer():
        return nn.Sequential(block(3), nn.LazyLinear(WIDTH), nn.LayerNorm(3))  # 54 + not known yet + 6

    table = """
        stage  layers  weight  parameters  names
        ─────────────────────────────────────────
            0       3   50.0%         162  0 .. 2
            1       1   50.0%          60  3
        heaviest: stage 0, 1.00 times the mean
    """
    assert [found.split() for found in on_ranks(2, case)] == [table.split()] * 2


LOOP = {"schedule": "interleaved-1f1b"}
DIFFERENT = {
    "microbatches": ({}, {"microbatches": 8}, ("microbatches=4", "microbatches=8")),
    "schedule": ({}, {"schedule": "gpipe"}, ("1f1b", "gpipe")),
    "option": ({}, {"warmup": "eager"}, ("rank 0 has Schedule('1f1b', ", "rank 1 has Schedule('1f1b', ")),
    "stages": (LOOP | {"stages_per_rank": 2}, LOOP | {"stages_per_rank": 1}, ("stages=4", "stages=2")),
}


@pytest.mark.parametrize(("first", "second", "shown"), DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_with_another_plan_are_found_at_the_start_with_both_values(first, second, shown):
    def case(wires):
        options = {"schedule": "1f1b", "microbatches": 4, "loss": square_loss} | (second if wires.rank else first)
        return error_of(Pipeline, float_layers(), transport=wires, **options)

    for error in on_ranks(2, case):
        assert type(error) is PipelineError
        assert "the ranks disagree on schedule" in str(error)
        assert all(value in str(error) for value in shown)


# ---- schedules


@pytest.mark.feature("0.11")
def test_two_iterations_over_one_rank_do_not_disturb_each_other():
    schedule = build("1f1b", ranks=3, microbatches=4)
    alone = list(schedule[1])

    first, second = iter(schedule[1]), iter(schedule[1])
    begin = [next(first), next(first)]
    interleaved = [(a, b) for b, a in zip(second, first, strict=False)]

    assert begin == alone[:2]
    assert [a for a, _ in interleaved] == alone[2:]
    assert [b for _, b in interleaved] == alone[: len(alone) - 2]
    assert [[str(a) for a in rank] for rank in schedule] == [[str(a) for a in schedule[rank]] for rank in range(3)]


@pytest.mark.feature("B11")
@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("name", ["forward-only", "1f1b", "gpipe"])
def test_forward_only_needs_at_most_two_receive_slots(name, num_ranks):
    for num_microbatches in range(1, 17):
        program = lower(build(name, ranks=num_ranks, microbatches=num_microbatches, forward_only=True))

        is_receive = program.op == Op.RECEIVE_FORWARD
        assert is_receive.sum() == (num_ranks - 1) * num_microbatches
        assert program.slot[is_receive].max() < 2


BY_HAND = drawn("""
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
""")


@pytest.mark.feature("B17")
def test_a_schedule_written_by_hand_is_predicted_and_run():
    costs = Costs.uniform(forward=1, backward_input=1, backward_weight=1)
    task = float_task(6)

    predicted = plan(BY_HAND, costs).timeline
    outcomes = on_pipelines(2, task, lambda pipeline: step_task(pipeline, task, record=True), BY_HAND, None)

    # Rank 1 begins after 1 second and is never idle; the last backward of rank 0 follows it.
    assert predicted.makespan_s == pytest.approx(1 + 3 * 3 + 2)
    assert predicted.peak_activations == [3, 1]
    assert difference(outcomes, task.reference(3)) == []
    measured = outcomes[0].timeline
    assert [str(i) for rank in range(2) for i in measured.program[rank]] == [
        str(i) for rank in range(2) for i in predicted.program[rank]
    ]
    assert measured.peak_activations == predicted.peak_activations


RING = drawn(
    """
    0F0 0F1 2F0 2F1 0F2 0F3 2B0 2B1 0B0 0B1 2F2 2F3 2B2 2B3 0B2 0B3
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1F2 1F3 3F2 3B2 3F3 3B3 1B2 1B3
    """,
    placement=Placement.loop(2, 4),
)


@pytest.mark.feature("0.14", "C7", "X11")
@pytest.mark.slow
@pytest.mark.parametrize("body", [step_task, second_step])
def test_two_stages_per_rank_in_a_ring_run_on_two_processes_bit_for_bit(two_ranks, body):
    """The second step has no headers, and receives are posted ahead."""
    assert differences_on_gloo(two_ranks, ring, body) == [[]]


def ring():
    return [(float_task(8), RING, 4, {})]
