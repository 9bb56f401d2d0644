"""Any number of microbatches in one pipeline: `step(..., microbatches=n)` and `evaluate(..., microbatches=n)`."""

import random
import time

import pytest
import torch
from torch import nn

from penstock import step_programs
from penstock.errors import EndOfData, StepRefused
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.batch.stream import Part, Stream
from penstock.ir.program import Program
from penstock.ir.recompute import with_recompute
from penstock.ir.schedule import Schedule
from penstock.models import AuxiliaryLoss, Skip
from penstock.pipeline import Pipeline
from penstock.planning import prove_and_lower
from penstock.proofs import check
from penstock.schedules import build
from tests.support.local_pipelines import (
    LENGTH,
    NEARLY,
    VOCABULARY,
    WIDTH,
    Masked,
    Task,
    block,
    count_tokens,
    difference,
    error_of,
    float_layers,
    gradients_of,
    on_ranks,
    outcome_of,
    square_loss,
    token_layers,
    token_loss,
    two_routes,
    values,
    zero,
)
from tests.support.mesh_pipelines import FLOAT, on_mesh

FAMILIES = ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zbv"]
M = 4
"""Number of microbatches of the schedules."""


def imported():
    """Schedules that are given whole: torch's text of computations, torch's text of a program, and two routes as JSON.

    The last is not for the numbers below 2, since each of its two routes trains a copy of the model.
    """
    zbv, interleaved = (build(name, ranks=2, microbatches=M) for name in ("zbv", "interleaved-1f1b"))
    program = prove_and_lower(interleaved)
    return {
        "from torch": Schedule.from_csv(zbv.to_csv()),
        "program": Program.from_json(program.to_json()),
        "two routes": Schedule.from_json(two_routes(2, M).to_json()),
    }


SCHEDULES = {**dict.fromkeys(FAMILIES), **imported()}


def task_of(num_rows):
    inputs, target = (values(seed, num_rows, WIDTH, dtype=FLOAT) for seed in (1, 2))
    return Task(lambda: float_layers(FLOAT, 8), (inputs,), target, options={"allow_ragged": True})


def made(wires, task, name, **options):
    schedule = SCHEDULES.get(name)
    number = M if schedule is None else None
    options = {"transport": wires, **task.options, **options}
    return Pipeline(task.make_layers(), name if schedule is None else schedule, number, task.loss, **options)


def taken(pipeline, task, call, **options):
    """What a rank passes: the first and last stage their parts of the batch, others nothing."""
    placement = pipeline.schedule.placement
    stages = [stage.index for stage in pipeline.stages]
    args = task.inputs if any(placement.previous_stage[index] < 0 for index in stages) else ()
    target = task.target if any(placement.next_stage[index] < 0 for index in stages) else None
    return call(*args, target=target, **task.keywords, **options)


def steps(wires, name, tasks_and_numbers, **options):
    outcomes = []
    with made(wires, tasks_and_numbers[0][0], name, **options) as pipeline:
        for task, number in tasks_and_numbers:
            zero(pipeline)
            outcomes.append(outcome_of(pipeline, taken(pipeline, task, pipeline.step, microbatches=number)))
            assert len(outcomes[-1].result.losses) == number
    return outcomes


def mistakes(num_ranks, name, numbers, make_task=task_of, **options):
    """How steps with these numbers of microbatches in one pipeline differ from one process."""
    tasks = [make_task(number + number % 3) for number in numbers]
    pairs = list(zip(tasks, numbers, strict=True))
    by_rank = on_ranks(num_ranks, lambda wires: steps(wires, name, pairs, **options))
    return [
        (number, difference([outcomes[index] for outcomes in by_rank], task.reference(number), **NEARLY))
        for index, (task, number) in enumerate(zip(tasks, numbers, strict=True))
    ]


def none_of(numbers):
    return [(number, []) for number in numbers]


@pytest.mark.feature("F10")
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_step_has_its_own_number(name):
    numbers = [4, 7, 2, 9, 4, 3]

    assert mistakes(2, name, numbers) == none_of(numbers)


@pytest.mark.slow
@pytest.mark.feature("F10")
@pytest.mark.parametrize("name", [*SCHEDULES, "dualpipe-v"])
def test_numbers_from_1_to_40_in_random_order(name):
    least = {"dualpipe-v": 4, "two routes": 2}.get(name, 1)
    numbers = random.Random(0).sample(range(least, 41), 41 - least)

    assert mistakes(2, name, numbers) == none_of(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b"])
def test_four_ranks_take_any_number(name):
    numbers = [4, 1, 13, 6, 21]

    assert mistakes(4, name, numbers, stages_per_rank=None) == none_of(numbers)


COMBINATIONS = {
    "recompute": ("1f1b", {"recompute": "true"}),
    "groups of messages": ("1f1b", {"messages": "coalesced"}),
    "rendezvous": ("zbv", {"messages": "rendezvous"}),
    "debug": ("1f1b", {"debug": "values"}),
    "offload": ("1f1b", {"offload": [0]}),
}


@pytest.mark.parametrize(("name", "options"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_other_options_hold_for_any_number(name, options):
    numbers = [4, 6, 1]

    assert mistakes(2, name, numbers, **options) == none_of(numbers)


def test_a_whole_schedule_with_recomputation_runs_in_rounds():
    SCHEDULES["recomputing"] = with_recompute(build("1f1b", ranks=2, microbatches=M))

    assert mistakes(2, "recomputing", [6, 1, 9]) == none_of([6, 1, 9])


def test_slices_of_any_number():
    def make_task(num_rows):
        pair = [values(seed, num_rows, 4, WIDTH, dtype=FLOAT) for seed in (1, 2)]
        return Task(lambda: float_layers(FLOAT, 4), (pair[0],), pair[1], options={"allow_ragged": True})

    assert mistakes(2, "seq1f1b", [4, 6, 1], make_task, slices=2) == none_of([4, 6, 1])


def test_padded_tokens_are_weighed_over_the_whole_batch():
    def make_task(num_rows):
        generator = torch.Generator().manual_seed(3)
        tokens, target = (torch.randint(VOCABULARY, (num_rows, LENGTH), generator=generator) for _ in range(2))
        target[::2, 1:] = -100
        options = {"allow_ragged": True, "count": count_tokens}
        return Task(lambda: token_layers(FLOAT), (tokens,), target, token_loss, options)

    assert mistakes(2, "1f1b", [4, 7, 2], make_task) == none_of([4, 7, 2])


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "two routes"])
def test_an_evaluation_takes_any_number_and_changes_nothing(name):
    tasks = [task_of(num_rows) for num_rows in (12, 5, 3)]

    def case(wires):
        with made(wires, tasks[0], name) as pipeline:
            return [
                taken(pipeline, task, pipeline.evaluate, microbatches=number).loss.item()
                for task in tasks
                for number in (1, 3, 11)
            ]

    expected = [task.reference(1)[0].loss.item() for task in tasks for _ in range(3)]
    for losses in on_ranks(2, case):
        assert losses == pytest.approx(expected, abs=1e-12)


class Scaling(nn.Module):
    """Multiplies a number by its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=FLOAT))

    def forward(self, x):
        return x * self.weight


def test_a_batch_without_rows_has_the_number_on_ranks_that_are_given_nothing_too():
    def case(wires):
        layers = [Scaling() for _ in range(3)]
        with Pipeline(layers, "1f1b", M, lambda output, target: output - target, transport=wires) as pipeline:
            number = torch.tensor(3.0, dtype=FLOAT)
            passed = [((number,), {"microbatches": 6}), ((), {}), ((), {"target": number, "microbatches": 6})]
            args, keywords = passed[pipeline.rank]
            result = pipeline.step(*args, **keywords)
            return [loss.item() for loss in result.losses], pipeline.stages[0].modules[0].weight.grad.item()

    assert on_ranks(3, case) == [([21.0] * 6, 12.0)] * 3


class Adding(nn.Module):
    """A layer with a loss of its own; the first one hands its input past all others to the last one."""

    def __init__(self, seed, *, is_first=False, is_last=False):
        super().__init__()
        self.inner, self.is_first, self.is_last = block(seed, FLOAT), is_first, is_last
        self.size, self.skip = AuxiliaryLoss("size", weight=0.3), Skip("features") if is_first or is_last else None

    def forward(self, x):
        if self.is_first:
            self.skip.put(x)
        x = self.inner(x)
        self.size.add(x.square().mean())
        return x + self.skip.get() if self.is_last else x


@pytest.mark.parametrize("name", ["1f1b", "from torch"])
def test_added_losses_and_skips_are_those_of_one_process(name):
    def make_task(num_rows):
        task = task_of(num_rows)
        task.make_layers = lambda: [Adding(seed, is_first=seed == 0, is_last=seed == 3) for seed in range(4)]
        return task

    assert mistakes(2, name, [4, 6, 1, 9], make_task) == none_of([4, 6, 1, 9])


def tied_layers():
    layers = token_layers(FLOAT)
    layers[-1].weight = layers[0].weight
    return layers


def test_tied_weights_are_reduced_and_optimizers_step_once_in_rounds():
    SCHEDULES["whole"] = build("1f1b", ranks=2, microbatches=M)

    def make_task(num_rows):
        generator = torch.Generator().manual_seed(3)
        tokens, target = (torch.randint(VOCABULARY, (num_rows, LENGTH), generator=generator) for _ in range(2))
        return Task(tied_layers, (tokens,), target, token_loss, {"allow_ragged": True})

    numbers = [6, 1, 4]
    tasks = [make_task(number) for number in numbers]

    def case(wires):
        gradients, updates = [], []
        with made(wires, tasks[0], "whole", optimizer_step=lambda: updates.append(1)) as pipeline:
            for task, number in zip(tasks, numbers, strict=True):
                zero(pipeline)
                taken(pipeline, task, pipeline.step, microbatches=number)
                gradients.append(gradients_of(pipeline.named_parameters()))
        return gradients, len(updates)

    found = on_ranks(2, case)

    assert [count for _, count in found] == [len(numbers)] * 2
    for index, (task, number) in enumerate(zip(tasks, numbers, strict=True)):
        _, expected = task.reference(number)
        for gradients, _ in found:
            for name, gradient in gradients[index].items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


def test_steps_add_up_whatever_their_numbers():
    task = task_of(12)

    def case(wires):
        with made(wires, task, "1f1b") as pipeline:
            with pipeline.no_sync():
                taken(pipeline, task, pipeline.step, microbatches=3)
            result = taken(pipeline, task, pipeline.step, microbatches=6)
            return outcome_of(pipeline, result)

    result, gradients = task.reference(6)
    twice = {name: 2 * gradient for name, gradient in gradients.items()}
    assert difference(on_ranks(2, case), (result, twice), **NEARLY) == []


def test_a_recorded_step_a_profile_and_a_memory_report_are_of_their_number():
    task = task_of(12)

    def case(wires):
        with made(wires, task, "1f1b") as pipeline:
            taken(pipeline, task, pipeline.step, microbatches=6, record=True)
            timelines = [pipeline.timeline, taken(pipeline, task, pipeline.profile, microbatches=12)]
            report = taken(pipeline, task, pipeline.memory_report, microbatches=3)
            found = taken(pipeline, task, pipeline.find_not_finite, microbatches=2)
            numbers = [timeline.program.num_microbatches for timeline in timelines]
            return numbers, [rank.peak_activations for rank in report.ranks], found

    expected = check(build("1f1b", ranks=2, microbatches=3)).peak_activations
    assert on_ranks(2, case) == [([6, 12], expected, "")] * 2


# ---- replicas


def on_replicas(name, numbers, *, ranks=2, **options):
    """Losses and gradients of two replicas, of this process with all rows, and what differs."""

    def case(places, num_replicas):
        layers = [*float_layers(FLOAT, 4), nn.Dropout(0.5), *float_layers(FLOAT, 4)]
        pipeline = Pipeline(layers, name, M, square_loss, mesh=places, seed=3, **options)
        outcomes = []
        for number in numbers:
            zero(pipeline)
            batch = [values(seed, 2 * number, WIDTH, dtype=FLOAT).chunk(num_replicas) for seed in (1, 2)]
            rows, target = (parts[pipeline.replica] for parts in batch)
            result = pipeline.step(rows, target=target, microbatches=2 * number // num_replicas)
            gradients = {key: whole(parameter.grad) for key, parameter in pipeline.named_parameters()}
            outcomes.append((result.loss.item(), gradients))
        return outcomes

    return on_mesh(1, 1, case, 1)[0], on_mesh(ranks, 2, case, 2)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def assert_as_alone(numbers, alone, by_rank):
    for index in range(len(numbers)):
        loss, gradients = alone[index]
        for outcomes in by_rank:
            assert outcomes[index][0] == pytest.approx(loss, abs=1e-12)
            for key, gradient in outcomes[index][1].items():
                torch.testing.assert_close(gradient, gradients[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_replicas_draw_as_one_process_with_the_microbatches_of_both(name):
    numbers = [4, 7, 1, 9, 4]

    assert_as_alone(numbers, *on_replicas(name, numbers))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("1f1b", "zbv") else pytest.mark.full) for name in FAMILIES],
)
def test_replicas_take_numbers_from_1_to_40_in_random_order(name):
    numbers = random.Random(1).sample(range(1, 41), 40)

    assert_as_alone(numbers, *on_replicas(name, numbers))


@pytest.mark.parametrize("shard", [pytest.param("full", marks=pytest.mark.slow), "optimizer"])
@pytest.mark.parametrize("schedule", ["1f1b", build("1f1b", ranks=2, microbatches=M)], ids=["family", "whole"])
def test_shards_take_any_number(shard, schedule):
    numbers = [4, 6, 1]

    def case(places):
        layers = float_layers(FLOAT, 8)
        number = M if isinstance(schedule, str) else None
        pipeline = Pipeline(layers, schedule, number, square_loss, mesh=places, shard=shard)
        losses = []
        for number in numbers:
            batch = [values(seed, 2 * number, WIDTH, dtype=FLOAT).chunk(2) for seed in (1, 2)]
            rows, target = (parts[pipeline.replica] for parts in batch)
            losses.append(pipeline.step(rows, target=target, microbatches=number).loss.item())
            pipeline.evaluate(rows, target=target, microbatches=3)
        norm = pipeline.clip_grad_norm_(1e9).item()
        return losses, norm

    layers = float_layers(FLOAT, 8)
    expected = []
    for number in numbers:
        rows, target = (values(seed, 2 * number, WIDTH, dtype=FLOAT) for seed in (1, 2))
        loss = square_loss(nn.Sequential(*layers)(rows), target)
        loss.backward()
        expected.append(loss.item())
    norm = torch.nn.utils.clip_grad_norm_(nn.Sequential(*layers).parameters(), 1e9).item()
    for losses, rank_norm in on_mesh(2, 2, case):
        assert losses == pytest.approx(expected, abs=1e-12)
        assert rank_norm == pytest.approx(norm, abs=1e-12)


# ---- streams


def parts_of(task, number):
    inputs, target = (tensor.chunk(number) for tensor in (task.inputs[0], task.target))
    return [Part(*pair[:1], target=pair[1]) for pair in zip(inputs, target, strict=True)]


@pytest.mark.parametrize("says", ["the step", "the stream", "the stream once"])
def test_a_stream_brings_any_number_also_to_ranks_that_are_given_nothing(says):
    numbers = [4, 4] if says == "the stream once" else [3, 5, 1]
    tasks = [task_of(2 * number) for number in numbers]

    def case(wires):
        items = [part for task, number in zip(tasks, numbers, strict=True) for part in parts_of(task, number)]
        by_stream = {"the step": None, "the stream": iter(numbers), "the stream once": 4}[says]
        stream = Stream(items, microbatches=by_stream)
        outcomes = []
        with Pipeline(tasks[0].make_layers(), "1f1b", 2, square_loss, transport=wires) as pipeline:
            for number in numbers:
                zero(pipeline)
                asked = {"microbatches": number} if says == "the step" else {}
                result = pipeline.step(*([] if pipeline.rank == 1 else [stream]), **asked)
                outcomes.append(outcome_of(pipeline, result))
            return outcomes, error_of(pipeline.step, *([] if pipeline.rank == 1 else [stream]))

    by_rank = on_ranks(3, case)

    for index, task in enumerate(tasks):
        outcomes = [outcomes[index] for outcomes, _ in by_rank]
        assert difference(outcomes, task.reference(numbers[index]), **NEARLY) == []
    assert [type(error) for _, error in by_rank] == [EndOfData] * 3


def test_a_refused_step_leaves_its_number_to_the_next_one():
    task = task_of(6)

    def case(wires):
        stream = Stream(parts_of(task, 3), microbatches=[3])
        with Pipeline(task.make_layers(), "1f1b", 2, square_loss, transport=wires) as pipeline:
            asked = {"microbatches": 2} if pipeline.rank == 0 else {}
            error = error_of(pipeline.step, stream, **asked)
            return error, outcome_of(pipeline, pipeline.step(stream))

    found = on_ranks(2, case)

    assert all("the stream says itself how many it brings" in str(error) for error, _ in found)
    assert difference([outcome for _, outcome in found], task.reference(3), **NEARLY) == []


# ---- layouts of messages


def known_layouts(pipeline, task, numbers):
    """Whether the layouts of messages were known before each step, and the outcome of each."""
    known, outcomes = [], []
    for number in numbers:
        zero(pipeline)
        outcomes.append(outcome_of(pipeline, taken(pipeline, task, pipeline.step, microbatches=number)))
        known.append(pipeline._runner._messenger.layouts.is_static)
    return known, outcomes


def test_another_number_of_microbatches_of_one_size_learns_no_layouts():
    numbers = [4, 8, 2, 4]

    def case(wires):
        with made(wires, task_of(8), "1f1b") as pipeline:
            return [known_layouts(pipeline, task_of(2 * number), [number]) for number in numbers]

    by_rank = on_ranks(3, case)

    for steps_of_rank in by_rank:
        assert [known for known, _ in steps_of_rank] == [[False], [True], [True], [True]]
    for index, number in enumerate(numbers):
        outcomes = [steps_of_rank[index][1][0] for steps_of_rank in by_rank]
        assert difference(outcomes, task_of(2 * number).reference(number), **NEARLY) == []


class Widening(nn.Module):
    """Returns its input, and zeros whose number depends on the index of the microbatch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, microbatch_place):
        return self.inner(x), torch.zeros(1 + microbatch_place.index)


class Narrowing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pair):
        return self.inner(pair[0]) + 0.0 * pair[1].sum()


def test_a_model_whose_microbatches_differ_learns_the_layouts_of_each_number():
    numbers, tasks = [4, 2, 8, 4], {number: task_of(2 * number) for number in (2, 4, 8)}

    def case(wires):
        first, second = float_layers(FLOAT, 2)
        with Pipeline([Widening(first), Narrowing(second)], "1f1b", M, square_loss, transport=wires) as pipeline:
            return [known_layouts(pipeline, tasks[number], [number]) for number in numbers]

    by_rank = on_ranks(2, case)

    for steps_of_rank in by_rank:
        assert [known for known, _ in steps_of_rank] == [[False], [False], [False], [True]]
    for index, number in enumerate(numbers):
        tasks[number].make_layers = lambda: float_layers(FLOAT, 2)
        result, gradients = tasks[number].reference(number)
        gradients = {name.replace(".", ".inner.", 1): gradient for name, gradient in gradients.items()}
        outcomes = [steps_of_rank[index][1][0] for steps_of_rank in by_rank]
        assert difference(outcomes, (result, gradients), **NEARLY) == []


def test_microbatches_of_two_sizes_are_two_kinds():
    batches = [(4, 7), (2, 3), (3, 6), (2, 2)]  # of 2, 2, 2 and 1 rows; of 2 and 1; of 2 each; of 1 each

    def case(wires):
        with made(wires, task_of(7), "1f1b") as pipeline:
            return [known_layouts(pipeline, task_of(rows), [number])[0] for number, rows in batches]

    assert on_ranks(2, case) == [[[False], [True], [True], [False]]] * 2


# ---- what is refused


def refusals(num_ranks, name, call_of, task, **options):
    """What `call_of(rank)` raises on every rank; the next step of 4 must be right."""

    def case(wires):
        with made(wires, task, name, **options) as pipeline:
            args, keywords = call_of(pipeline.rank)
            error = error_of(pipeline.step, *args, **keywords)
            zero(pipeline)
            return error, outcome_of(pipeline, taken(pipeline, task, pipeline.step, microbatches=4))

    found = on_ranks(num_ranks, case)
    assert difference([outcome for _, outcome in found], task.reference(4), **NEARLY) == []
    assert {type(error) for error, _ in found} == {StepRefused}
    return [str(error) for error, _ in found]


TASK = task_of(8)
FIRST, LAST = {"target": None}, {"target": TASK.target}
REFUSED = {
    "another number": ("1f1b", [2, 8], "the ranks disagree on microbatches: rank 0 has 2, rank 1 has 8"),
    "none beside a number": ("1f1b", [8, None], "the ranks disagree on microbatches: rank 0 has 8, rank 1 has 4"),
    "more than rows": ("1f1b", [9, 9], "use at most 8 microbatches"),
    "too few for a family": ("dualpipe-v", [3, 3], "needs at least 2 microbatches per rank, got 3 on 2 ranks; use 4"),
    "odd": ("dualpipe", [7, 7], "use 8"),
    "one for two copies": ("two routes", [1, 1], "use 2 or more"),
    "zero": ("1f1b", [0, 0], "microbatches is 0 of type int; expected a whole number from 1"),
    "a text": ("1f1b", ["8", "8"], "microbatches is"),
    "true": ("1f1b", [True, True], "microbatches is"),
    "too many": ("1f1b", [10**9, 10**9], "expected a whole number from 1 to 1,000,000"),
}


@pytest.mark.parametrize(("name", "numbers", "told"), REFUSED.values(), ids=REFUSED)
def test_a_number_that_cannot_be_is_refused_on_all_ranks_and_the_next_step_runs(name, numbers, told):
    def call_of(rank):
        return TASK.inputs, {"target": TASK.target, "microbatches": numbers[rank]}

    for text in refusals(2, name, call_of, TASK):
        assert told in text


def test_a_presplit_of_another_number_is_refused_on_all_ranks():
    pieces = PreSplit(list(TASK.inputs[0].chunk(4)))

    def call_of(rank):
        return [(pieces,), ()][rank], {"microbatches": 8, "target": TASK.target if rank else None}

    for text in refusals(2, "1f1b", call_of, TASK):
        assert "PreSplit holds 4 parts for 8 microbatches" in text


def test_a_part_of_the_batch_without_rows_and_without_the_number_is_refused_by_it():
    layers = [Masked(seed, FLOAT) for seed in range(3)]

    def case(wires):
        with Pipeline(layers, "1f1b", M, square_loss, transport=wires) as pipeline:
            numbers = {"microbatches": 8} if pipeline.rank != 1 else {}
            args, target = [(TASK.inputs, None), ((), None), ((), TASK.target)][pipeline.rank]
            return str(error_of(pipeline.step, *args, target=target, scale=1.5, **numbers))

    for text in on_ranks(3, case):
        assert "the ranks disagree on microbatches: rank 0 has 8, rank 1 has 4" in text


def test_a_step_takes_a_number_in_place_of_a_size():
    numbers = [(None, 6), (3, 3)]
    task = task_of(12)

    def case(wires):
        outcomes = []
        with Pipeline(task.make_layers(), "1f1b", None, square_loss, transport=wires, microbatch_size=2) as pipeline:
            for number, _ in numbers:
                zero(pipeline)
                result = pipeline.step(*task.inputs, target=task.target, microbatches=number)
                outcomes.append(outcome_of(pipeline, result))
        return outcomes

    for index, (_, number) in enumerate(numbers):
        outcomes = [outcomes[index] for outcomes in on_ranks(2, case)]
        assert difference(outcomes, task.reference(number), **NEARLY) == []


# ---- planning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [("1f1b", 9), ("zbv", 9), ("dualpipe-v", 9), ("dualpipe", 10)],  # dualpipe has other routes in rounds
)
def test_a_large_program_is_planned_beside_the_steps_and_rounds_run_meanwhile(name, number, monkeypatch):
    monkeypatch.setattr(step_programs, "ROWS_PLANNED_AT_ONCE", 0)
    task, numbers = task_of(2 * number), [number] * 40

    def case(wires):
        outcomes, orders = [], []
        with made(wires, task, name) as pipeline:
            for number in numbers:
                zero(pipeline)
                outcomes.append(outcome_of(pipeline, taken(pipeline, task, pipeline.step, microbatches=number)))
                orders.append(pipeline._runner.program.actions().digest())
                time.sleep(0.005)  # others than the ranks must run, too
        return outcomes, orders

    by_rank = on_ranks(2, case)

    own = build(name, ranks=2, microbatches=number).digest()
    for _, orders in by_rank:
        assert orders == by_rank[0][1]  # all ranks change at the same step
        assert orders[0] != own
        assert orders[-1] == own
    for index in (0, -1):
        outcomes = [outcomes[index] for outcomes, _ in by_rank]
        assert difference(outcomes, task.reference(number), **NEARLY) == []


def test_a_number_whose_own_schedule_takes_too_much_memory_runs_in_rounds():
    task = task_of(18)

    def case(wires):
        with made(wires, task, "gpipe", memory_limit="4 microbatches") as pipeline:
            result = taken(pipeline, task, pipeline.step, microbatches=9)
            outcome = outcome_of(pipeline, result)
            programs = [pipeline._runner.program]
            for is_split in (False, True):
                timeline = taken(pipeline, task, pipeline.profile, microbatches=9, split_backwards=is_split)
                programs.append(timeline.program)
            return outcome, [check(program).peak_activations for program in programs]

    found = on_ranks(2, case)

    assert [peaks for _, peaks in found] == [[[4, 4]] * 3] * 2
    assert difference([outcome for outcome, _ in found], task.reference(9), **NEARLY) == []
