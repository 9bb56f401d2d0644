"""Microbatches that are cut along the sequence train like whole ones where layers treat positions alone."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, StepRefused
from penstock.execute.batch.microbatch import BatchSpec, Replicate
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.support.local_pipelines import (
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
    on_pipelines,
    on_ranks,
    square_loss,
    step_task,
    token_layers,
    token_loss,
    values,
)

FLOAT64 = torch.float64


def long_task(rows, length, **options):
    inputs, target = (values(seed, rows, length, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    return Task(lambda: float_layers(FLOAT64), (inputs,), target, options=options)


def in_slices(task, body=None, num_microbatches=3, slices=2):
    """Return what `body(pipeline)` returned on two ranks, or the outcomes of a step."""
    body = body or (lambda pipeline: step_task(pipeline, task))
    return on_pipelines(2, task, body, "seq1f1b", num_microbatches, slices=slices)


def sum_loss(output, target):
    return ((output - target) ** 2).sum()


@pytest.mark.feature("B9")
@pytest.mark.parametrize(("loss", "reduction"), [(square_loss, "mean"), (sum_loss, "sum")])
@pytest.mark.parametrize("length", [6, 5])
def test_means_and_sums_over_slices_are_those_of_whole_sequences(loss, reduction, length):
    task = long_task(6, length, reduction=reduction, allow_ragged=True)
    task.loss = loss

    found = in_slices(task, slices=4)

    assert difference(found, task.reference(3), **NEARLY) == []


def test_slices_of_which_no_token_counts_weigh_nothing():
    generator = torch.Generator().manual_seed(5)
    tokens, target = torch.randint(VOCABULARY, (2, 6, 4), generator=generator)
    target[:2] = -100  # a microbatch without any
    target[2:4, 2:] = -100  # a slice without any
    task = Task(lambda: token_layers(FLOAT64), (tokens,), target, token_loss, {"count": count_tokens})

    found = in_slices(task)

    result, gradients = task.reference(3)
    assert result.losses[0].isnan()
    for outcome in found:
        assert outcome.result.losses[0].isnan()
        outcome.result.losses[0] = result.losses[0] = torch.tensor(0.0, dtype=FLOAT64)
    assert difference(found, (result, gradients), **NEARLY) == []


def test_the_loss_sees_one_slice_after_another():
    seen = []
    task = long_task(4, 5, allow_ragged=True)

    def loss(output, target):
        seen.append(target)
        return square_loss(output, target)

    schedule = build("seq1f1b", ranks=1, microbatches=2, slices=2)
    pipeline = Pipeline(task.make_layers(), schedule, loss=loss, **task.options)
    pipeline.evaluate(*task.inputs, target=task.target)

    first, second = task.target.split(2)
    expected = [first[:, :3], first[:, 3:], second[:, :3], second[:, 3:]]
    assert len(seen) == 4
    assert all(map(torch.equal, seen, expected))


def test_keywords_are_cut_like_the_batch_or_go_along_whole():
    task = long_task(4, 6, specs=BatchSpec(kwargs={"scale": Replicate()}))
    task.make_layers = lambda: [Masked(0, FLOAT64), Masked(1, FLOAT64)]
    task.keywords = {"mask": values(3, 4, 6, 1, dtype=FLOAT64), "scale": values(4, 1, WIDTH, dtype=FLOAT64)}

    found = in_slices(task, None, 2, 3)

    assert difference(found, task.reference(2), **NEARLY) == []


# ---- mistakes


def test_a_length_that_does_not_divide_is_refused_everywhere_and_does_no_harm():
    task, uneven = long_task(6, 6), long_task(6, 5)

    found = in_slices(task, lambda pipeline: (error_of(step_task, pipeline, uneven), step_task(pipeline, task)))

    assert all(type(error) is StepRefused and "2 slices do not divide evenly" in str(error) for error, _ in found)
    assert difference([outcome for _, outcome in found], task.reference(3), **NEARLY) == []


def test_a_whole_schedule_is_for_its_own_number_of_slices():
    schedule = build("seq1f1b", ranks=1, microbatches=2, slices=2)

    assert Pipeline(float_layers(), schedule, slices=2).schedule is schedule
    with pytest.raises(ConfigError, match="slices: 3, but seq1f1b is for 2 slices"):
        Pipeline(float_layers(), schedule, slices=3)
    with pytest.raises(ConfigError, match="1f1b does not cut microbatches"):
        Pipeline(float_layers(), "1f1b", slices=2)


@pytest.mark.parametrize("layer", [lambda: nn.MultiheadAttention(WIDTH, 2), lambda: nn.GRU(WIDTH, WIDTH)])
def test_layers_that_look_back_and_carry_nothing_are_refused_on_every_rank_before_they_learn_wrongly(layer):
    layers = [block(0), nn.Sequential(layer())]

    def case(wires):
        return error_of(Pipeline, layers, "seq1f1b", 2, square_loss, slices=2, transport=wires)

    for error in on_ranks(2, case):
        assert isinstance(error, ConfigError)
        assert "looks back over the sequence and carries nothing" in str(error)
        assert "in a ps.Carry" in str(error)
