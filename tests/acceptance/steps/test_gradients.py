"""Whatever its schedule, a pipeline computes what one process does: every family of the registry, executed.

By default a seeded sample of small shapes runs; with the hypothesis profile `full` (`make test-full`) all shapes do.
"""

import random
from functools import cache, partial
from itertools import chain, islice, product, zip_longest

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.schedules import FAMILIES, Choice, build
from tests.support.local_pipelines import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    Outcome,
    Task,
    count_tokens,
    difference,
    float_layers,
    is_same,
    on_pipelines,
    square_loss,
    step_task,
    token_layers,
    token_loss,
    values,
    visits_in_order,
    zero,
)
from tests.support.strategies import feasible_schedules

FLOAT64 = torch.float64
TOLERANCE = 1e-12
LENGTH = 5  # no multiple of 2, 3 or 4 slices
NUM_SAMPLED = 5
NUM_IN_FULL = 800
"""All shapes of every family but breadth-depth, which has 1,648."""

SMALL = {"ranks": 4, "stages_per_rank": 3, "microbatches": 9, "slices": 3}
LARGE = {"ranks": 8, "stages_per_rank": 4, "microbatches": 17, "slices": 4}


# ---- the shapes


def schedules_of(family, limit):
    """Yield the shapes up to a limit that the family does not refuse, in a random order, all numbers of ranks in turn.

    Options take one random value per shape, or none.
    """
    chance = random.Random(family.name)
    per_rank = range(1, limit["stages_per_rank"] + 1) if 0 in family.stages_per_rank else family.stages_per_rank
    slices = range(1, limit["slices"] + 1) if family.takes_slices else [1]
    others = list(product(per_rank, range(1, limit["microbatches"] + 1), slices))
    columns = [
        [(ranks, *other) for other in chance.sample(others, len(others))] for ranks in range(limit["ranks"], 0, -1)
    ]
    for cell in filter(None, chain.from_iterable(zip_longest(*columns))):
        shape = dict(zip(("ranks", "stages_per_rank", "microbatches", "slices"), cell, strict=True))
        shape |= options_of(family, chance)
        try:
            yield shape, build(family.name, **shape)
        except ConfigError:
            continue


def options_of(family, chance):
    options = {name: option for name, option in family.options.items() if chance.random() < 0.5}
    return {
        name: chance.choice(option.choices) if isinstance(option, Choice) else chance.randint(1, 6)
        for name, option in options.items()
    }


# ---- the models


@cache
def float_task(num_layers, num_microbatches):
    """Mean squares over all positions."""
    inputs, target = (values(seed, 2 * num_microbatches, LENGTH, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    return Task(partial(float_layers, FLOAT64, num_layers), (inputs,), target, square_loss, {"allow_ragged": True})


@cache
def token_task(num_layers, num_microbatches):
    """The mean over tokens of a ragged batch; of some slices all tokens count, of others none."""
    generator = torch.Generator().manual_seed(3)
    tokens, target = torch.randint(VOCABULARY, (2, 2 * num_microbatches + 1, LENGTH), generator=generator)
    target[::2, 2:] = IGNORED
    options = {"allow_ragged": True, "count": count_tokens}
    return Task(partial(token_layers, FLOAT64, num_layers - 2), (tokens,), target, token_loss, options)


def task_for(schedule):
    """A model of a layer or two per stage; every second one reads tokens."""
    num_layers = len(schedule.placement.routes[0]) + schedule.num_microbatches % 3
    if num_layers < 2 or (schedule.num_microbatches + schedule.num_ranks) % 2:
        return float_task(num_layers, schedule.num_microbatches)
    return token_task(num_layers, schedule.num_microbatches)


# ---- the runs


def run_in(pipeline, task, num_steps=2):
    """Evaluate, then train: the second step knows all shapes and posts its receives ahead."""
    outcomes = [Outcome(pipeline.evaluate(*task.inputs, target=task.target, return_outputs=True), {})]
    for _ in range(0 if pipeline.schedule.is_forward_only else num_steps):
        zero(pipeline)
        outcomes.append(step_task(pipeline, task))
    pipeline.close()
    return outcomes


def differences(schedule, runs):
    """How what the ranks computed differs from one process: nothing, unless there is a mistake."""
    result, gradients = task_for(schedule).reference(schedule.num_microbatches)
    tolerances = {
        "tolerance": None if visits_in_order(schedule) else TOLERANCE,
        "loss_tolerance": None if schedule.num_slices == 1 else TOLERANCE,
    }
    evaluations, *steps = zip(*runs, strict=True)
    found = difference(evaluations, (result, {}), **tolerances)
    for outcomes in steps:
        found += difference(outcomes, (result, gradients), **tolerances)
    for outcomes in (evaluations, *steps):
        found += wrong_outputs(schedule.placement, outcomes, torch.cat(result.outputs))
    return found


def wrong_outputs(placement, outcomes, expected):
    """The outputs are whole on the rank of the last stage of the first route, and on no other."""
    collector = placement.rank_of_stage[placement.routes[0][-1]]
    wanted = [expected if rank == collector else None for rank in range(placement.num_ranks)]
    pairs = zip(outcomes, wanted, strict=True)
    return [
        f"the outputs on rank {rank}"
        for rank, (outcome, output) in enumerate(pairs)
        if not is_same(outcome.result.outputs, output, TOLERANCE)
    ]


def mistakes(schedule, num_steps=2):
    """What is wrong with the schedule when its ranks are threads."""
    task = task_for(schedule)
    runs = on_pipelines(schedule.num_ranks, task, lambda pipeline: run_in(pipeline, task, num_steps), schedule, None)
    return differences(schedule, runs)


@pytest.mark.feature("B7")
@pytest.mark.slow
@pytest.mark.timeout(2400)  # of hundreds of shapes
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_what_one_process_does(name, is_full):
    schedules = schedules_of(FAMILIES[name], LARGE if is_full else SMALL)
    chosen = islice(schedules, NUM_IN_FULL if is_full else NUM_SAMPLED)
    num_steps = 1 if is_full else 2

    found = {str(shape): mistakes(schedule, num_steps) for shape, schedule in chosen}

    assert len(found) > 0
    assert {shape: wrong for shape, wrong in found.items() if wrong} == {}


@pytest.mark.slow
@given(feasible_schedules())
def test_every_feasible_order_computes_what_one_process_does(schedule):
    assert mistakes(schedule) == []


# ---- on gloo

ON_GLOO = [
    {"name": "dualpipe", "ranks": 4, "microbatches": 8},
    {"name": "chimera", "ranks": 4, "microbatches": 4},
    {"name": "seq1f1b", "ranks": 4, "microbatches": 3, "slices": 2},
    {"name": "breadth-depth", "ranks": 4, "microbatches": 4, "slices": 3, "stages_per_rank": 2},
    {"name": "zbv", "ranks": 4, "microbatches": 5},
]


@pytest.mark.slow
def test_bidirectional_and_sliced_schedules_compute_the_same_on_gloo(four_ranks):
    per_rank = four_ranks.run(run_on_gloo, timeout_s=60.0)

    runs = zip(*per_rank, strict=True)
    schedules = [build(**shape) for shape in ON_GLOO]
    found = {schedule.name: differences(schedule, own) for schedule, own in zip(schedules, runs, strict=True)}
    assert found == {schedule.name: [] for schedule in schedules}


def run_on_gloo(rank):
    found = []
    for shape in ON_GLOO:
        schedule = build(**shape)
        task = task_for(schedule)
        layers = task.make_layers()
        pipeline = Pipeline(layers, schedule, loss=task.loss, process_group=dist.group.WORLD, **task.options)
        found.append(run_in(pipeline, task))
        held = {name for stage in pipeline.stages for name in stage.layers}
        # Processes share no modules, so those of both copies are used in place, and those of other ranks are freed.
        params = [(param, str(index) in held) for index, layer in enumerate(layers) for param in layer.parameters()]
        assert all(param.grad is not None and param.is_meta != is_held for param, is_held in params)
        for outcome in found[-1]:
            outcome.timeline = None
    return found
