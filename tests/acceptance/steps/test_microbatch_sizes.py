"""A size of microbatches, from which their number follows batch by batch: losses and gradients of one process."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, StepRefused
from penstock.execute.batch.microbatch import BatchSpec, PreSplit, Replicate, Split
from penstock.execute.batch.stream import Stream
from penstock.pipeline import Pipeline
from penstock.proofs import check
from penstock.schedules import build
from tests.support.local_pipelines import (
    NEARLY,
    WIDTH,
    Around,
    Task,
    block,
    difference,
    error_of,
    float_layers,
    on_ranks,
    outcome_of,
    square_loss,
    values,
    zero,
)
from tests.support.mesh_pipelines import FLOAT, on_mesh

FAMILIES = ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zbv", "dualpipe-v", "looped-bfs"]


def task_of(num_rows):
    inputs, target = (values(seed, num_rows, WIDTH, dtype=torch.float64) for seed in (1, 2))
    return Task(lambda: float_layers(torch.float64, 8), (inputs,), target)


def sized(wires, family, size, tasks, **options):
    """Take a step of each task in one pipeline; return the outcome of each, with gradients of its own."""
    pipeline = Pipeline(
        tasks[0].make_layers(), family, None, square_loss, transport=wires, microbatch_size=size, **options
    )
    outcomes = []
    for task in tasks:
        zero(pipeline)
        takes = [pipeline.rank == 0, pipeline.rank in pipeline.target_ranks]
        result = pipeline.step(*task.inputs * takes[0], target=task.target if takes[1] else None)
        outcomes.append((outcome_of(pipeline, result), len(result.losses)))
    pipeline.close()
    return outcomes


@pytest.mark.feature("F5")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_batch_makes_as_many_microbatches_as_its_rows_do(family):
    tasks = [task_of(num_rows) for num_rows in (16, 24, 8, 24)]

    by_rank = on_ranks(2, sized, family, 2, tasks)

    for index, task in enumerate(tasks):
        number = task.inputs[0].shape[0] // 2
        outcomes = [outcomes[index] for outcomes in by_rank]
        assert [count for _, count in outcomes] == [number] * 2
        assert difference([outcome for outcome, _ in outcomes], task.reference(number), **NEARLY) == []


def test_an_evaluation_of_any_rows_gives_the_loss_of_one_process():
    def case(wires):
        pipeline = Pipeline(
            float_layers(torch.float64, 8), "1f1b", None, square_loss, transport=wires, microbatch_size=2
        )
        tasks = [task_of(num_rows) for num_rows in (24, 3, 1, 16)]
        return [pipeline.evaluate(*task.inputs, target=task.target).loss.item() for task in tasks]

    found, again = on_ranks(2, case)

    expected = [task_of(num_rows).reference(1)[0].loss.item() for num_rows in (24, 3, 1, 16)]
    assert found == again == pytest.approx(expected, abs=1e-12)


def test_a_family_that_needs_more_microbatches_than_usual_takes_a_size():
    task = task_of(36)
    task.make_layers = lambda: float_layers(FLOAT, 12)

    by_rank = on_ranks(6, sized, "dualpipe-v", 2, [task])

    assert difference([outcome for ((outcome, _),) in by_rank], task.reference(18), **NEARLY) == []


def test_nothing_is_said_of_few_microbatches_before_a_batch_makes_them(recwarn):
    options = {"microbatch_size": 2, "stages_per_rank": 5}  # 10 stages, more than the 8 microbatches of a default

    on_ranks(
        2,
        lambda wires: Pipeline(
            float_layers(num_layers=10), "interleaved-1f1b", None, square_loss, transport=wires, **options
        ),
    )

    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("num_rows", [6, 18, 30])
def test_an_evaluation_may_have_a_number_for_which_the_family_has_no_schedule(num_rows):
    task = task_of(num_rows)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "dualpipe", None, square_loss, transport=wires, microbatch_size=2)
        return pipeline.evaluate(*task.inputs, target=task.target).loss.item()

    assert on_ranks(2, case) == pytest.approx([task.reference(1)[0].loss.item()] * 2, abs=1e-12)


def test_a_profile_and_a_memory_report_are_of_the_number_that_their_batch_makes():
    task = task_of(24)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "1f1b", None, square_loss, transport=wires, microbatch_size=2)
        profile = pipeline.profile(*task.inputs, target=task.target)
        report = pipeline.memory_report(*task.inputs, target=task.target)
        pipeline.step(*task.inputs, target=task.target, record=True)
        timelines = [profile, pipeline.timeline]
        return [timeline.program.num_microbatches for timeline in timelines], [
            rank.peak_activations for rank in report.ranks
        ]

    expected = check(build("1f1b", ranks=2, microbatches=12)).peak_activations
    assert on_ranks(2, case) == [([12, 12], list(expected))] * 2


@pytest.mark.parametrize("num_rows", [8, 32])
def test_replicas_draw_as_one_process_that_runs_the_microbatches_of_all(num_rows):
    inputs, target = (values(seed, num_rows, WIDTH, dtype=FLOAT) for seed in (1, 2))

    def case(places, num_replicas):
        layers = [*float_layers(FLOAT, 2), nn.Dropout(0.5)]
        pipeline = Pipeline(layers, "1f1b", None, square_loss, mesh=places, microbatch_size=1, seed=3)
        rows, wanted = (tensor.chunk(num_replicas)[places.replica] for tensor in (inputs, target))
        return pipeline.step(rows, target=wanted).loss.item()

    alone, two, four = (on_mesh(1, num, case, num)[0] for num in (1, 2, 4))

    assert [two, four] == pytest.approx([alone] * 2, abs=1e-12)


def test_random_numbers_of_replicas_differ_for_any_number_of_microbatches():
    def case(places):
        layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)]
        pipeline = Pipeline(layers, "1f1b", None, square_loss, mesh=places, microbatch_size=1, seed=3)
        rows = torch.ones(24, WIDTH)
        result = pipeline.step(rows, target=rows, return_outputs=True)
        return [tuple((output == 0).tolist()) for output in result.outputs]

    first, second = on_mesh(1, 2, case)

    # Places are counted over all replicas. By the usual 8 of each, the second one would begin within the first one's.
    assert first != second
    assert first[8:] != second[:16]


def test_uneven_rows_make_one_microbatch_more_where_they_may():
    task = task_of(21)

    found = on_ranks(2, lambda wires: sized(wires, "1f1b", 4, [task], allow_ragged=True))

    assert [count for ((_, count),) in found] == [6, 6]
    task.options = {"allow_ragged": True}
    assert difference([outcome for ((outcome, _),) in found], task.reference(6), **NEARLY) == []


REFUSED = {
    "rows that do not divide": ((task_of(9).inputs[0],), "has 9 rows, which microbatches of 2 rows do not"),
    "a PreSplit": (
        (PreSplit([torch.zeros(2, WIDTH)] * 8),),
        "a PreSplit, whose parts have a number and sizes of their own",
    ),
    "no rows": ((torch.zeros(0, WIDTH, dtype=torch.float64),), "has 0 rows"),
    "a Stream": ((Stream([]),), "a Stream brings microbatches of sizes of its own"),
}


@pytest.mark.parametrize(("arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_what_goes_without_a_size_is_refused_on_all_ranks_and_the_next_step_runs(arguments, told):
    task = task_of(24)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "1f1b", None, square_loss, transport=wires, microbatch_size=2)
        error = error_of(pipeline.step, *(arguments if pipeline.rank == 0 else ()))
        result = pipeline.step(*task.inputs, target=task.target)
        return error, outcome_of(pipeline, result)

    found = on_ranks(2, case)

    assert [type(error) for error, _ in found] == [StepRefused] * 2
    with pytest.raises(StepRefused, match=told):
        raise found[0][0]
    assert difference([outcome for _, outcome in found], task.reference(12), **NEARLY) == []


class Scaled(Around):
    """A layer with a factor, for which it takes a keyword."""

    def forward(self, x, *, scale):
        return self.inner(x) * scale


def with_scale(task, scale, family, **options):
    """Return a step's outcome, or refusal, on three ranks; the second one alone is given anything of `scale`."""

    def case(wires):
        layers = [block(0, FLOAT), Scaled(1, FLOAT), block(2, FLOAT)]
        pipeline = Pipeline(layers, family, None, square_loss, transport=wires, microbatch_size=2, **options)
        takes = [wires.rank == 0, wires.rank == 2]
        try:
            return pipeline.step(
                *task.inputs * takes[0],
                target=task.target if takes[1] else None,
                **({"scale": scale} if wires.rank == 1 else {}),
            ).loss.item()
        except StepRefused as error:
            return str(error)

    return on_ranks(3, case)


@pytest.mark.parametrize("num_rows", [8, 16, 24])
def test_a_presplit_on_a_rank_without_rows_is_refused_for_any_number(num_rows):
    scale = PreSplit([torch.tensor(1.0 + index, dtype=FLOAT) for index in range(8)])

    refusals = with_scale(task_of(num_rows), scale, "1f1b", specs=BatchSpec(kwargs=Replicate()))

    assert all("kwargs['scale'] is a PreSplit, whose parts have a number" in text for text in refusals)


@pytest.mark.parametrize("num_rows", [8, 24])
def test_slices_of_any_number_of_microbatches_are_those_of_one_process(num_rows):
    task = Task(None, (values(1, num_rows, 4, WIDTH, dtype=FLOAT),), values(2, num_rows, 4, WIDTH, dtype=FLOAT))
    # One factor for each position, and none for rows: the second rank hears of the number of microbatches.
    scale = values(3, 1, 4, 1, dtype=FLOAT)
    options = {"specs": BatchSpec(kwargs=Replicate()), "slice_specs": BatchSpec(kwargs=Split(1))}

    found = with_scale(task, scale, "seq1f1b", slices=2, **options)

    outputs = block(2, FLOAT)(Scaled(1, FLOAT)(block(0, FLOAT)(*task.inputs), scale=scale))
    assert found == pytest.approx([square_loss(outputs, task.target).item()] * 3, abs=1e-12)


def test_a_number_for_which_the_family_has_no_schedule_is_refused_on_all_ranks_and_the_next_step_runs():
    task, odd = task_of(16), task_of(10)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "dualpipe", None, square_loss, transport=wires, microbatch_size=2)
        error = error_of(pipeline.step, *odd.inputs, target=odd.target)
        return error, outcome_of(pipeline, pipeline.step(*task.inputs, target=task.target))

    found = on_ranks(2, case)

    assert all(type(error) is StepRefused and "microbatches" in str(error) for error, _ in found)
    assert difference([outcome for _, outcome in found], task.reference(8), **NEARLY) == []


@pytest.mark.parametrize(
    ("schedule", "options", "told"),
    [
        ("1f1b", {"microbatches": 4, "microbatch_size": 2}, "goes without microbatches, whose number follows from it"),
        (build("1f1b", ranks=1, microbatches=4), {"microbatch_size": 2}, "goes with the name of a family"),
        ("1f1b", {"microbatch_size": 0}, "expected 1 or more rows, or None"),
    ],
)
def test_a_size_goes_with_a_family_and_without_a_number(schedule, options, told):
    error = error_of(Pipeline, float_layers(), schedule, loss=square_loss, ranks=1, **options)

    assert type(error) is ConfigError
    assert error.key == "microbatch_size"
    assert told in str(error)


@pytest.mark.parametrize("setting", [{}, {"shard": "full"}])
def test_replicas_have_as_many_microbatches_each(setting):
    def case(places, rows):
        pipeline = Pipeline(
            float_layers(FLOAT, 8), "1f1b", None, square_loss, mesh=places, microbatch_size=2, **setting
        )
        own = rows[places.replica]
        inputs, target = (values(seed, sum(rows), WIDTH, dtype=FLOAT).split(rows)[places.replica] for seed in (1, 2))
        assert len(inputs) == own
        try:
            return len(pipeline.step(inputs, target=target).losses), pipeline.step(inputs, target=target).loss.item()
        except StepRefused as error:
            return str(error)

    even, uneven = on_mesh(2, 2, case, [24, 24]), on_mesh(2, 2, case, [24, 16])

    expected = task_of(48).reference(24)[0].loss.item()
    assert [count for count, _ in even] == [12] * 4
    assert [loss for _, loss in even] == pytest.approx([expected] * 4, abs=1e-12)
    assert all("make 12, 8 microbatches, by replica" in text for text in uneven)
