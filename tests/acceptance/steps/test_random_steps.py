"""Dropout draws the same on any number of ranks and in any schedule, and anew in each step."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.exactness.features import Recomputed, Skipping
from tests.support.local_pipelines import (
    WIDTH,
    Task,
    assert_errors,
    block,
    difference,
    error_of,
    errors_before_a_right_step,
    on_pipelines,
    pipeline_of,
    square_loss,
    step_task,
    values,
)

FLOAT64 = torch.float64
SEED = 5
NUM_MICROBATCHES = 8


def dropping(seed):
    return nn.Sequential(nn.Dropout(0.3), block(seed, FLOAT64), nn.Dropout(0.3))


def layers():
    return [Recomputed(dropping(seed)) if seed % 2 else dropping(seed) for seed in range(8)]


def noisy_loss(output, target):
    return square_loss(output + torch.randn(output.shape, dtype=FLOAT64), target)


def task(loss=square_loss, make_layers=layers):
    inputs, target = (values(seed, 2 * NUM_MICROBATCHES, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    return Task(make_layers, (inputs,), target, loss, {"seed": SEED})


def in_two_threads(first, second):
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(first), threads.submit(second)]:
            future.result()


def test_pairs_of_computations_in_two_threads_draw_and_hand_on_the_same():
    def skipping():
        ends = Skipping(dropping(9), puts=["a"]), Skipping(dropping(10), gets=["a"])
        first, last = map(Recomputed, ends)
        return [first, *layers(), last]

    own = task(make_layers=skipping)
    schedule = build("dualpipe-v", ranks=2, microbatches=NUM_MICROBATCHES)
    assert schedule.joined.any()

    found = on_pipelines(2, own, lambda pipeline: step_task(pipeline, own), schedule, None, overlap=in_two_threads)

    assert difference(found, own.reference(NUM_MICROBATCHES), tolerance=1e-12) == []


def test_a_loss_that_draws_does_so_alike_on_any_split():
    own = task(noisy_loss)

    found = on_pipelines(2, own, lambda pipeline: step_task(pipeline, own), "1f1b", NUM_MICROBATCHES)

    assert difference(found, own.reference(NUM_MICROBATCHES)) == []


def test_every_step_draws_anew_and_a_number_brings_a_draw_back():
    own = task()

    pipeline = pipeline_of(None, own)
    losses = [pipeline.step(*own.inputs, target=own.target).loss for _ in range(3)]
    assert pipeline.step_number == 3
    pipeline.step_number = 1
    again = pipeline.step(*own.inputs, target=own.target).loss

    assert len({loss.item() for loss in losses}) == 3
    assert torch.equal(again, losses[1])
    assert pipeline.step_number == 2


@pytest.mark.feature("H6")
@pytest.mark.parametrize("seed", [SEED, None])
def test_ranks_that_went_on_at_different_numbers_are_told_and_evaluate_all_the_same(seed):
    own = task()

    def case(pipeline):
        pipeline.step_number = 4 + pipeline.rank
        pipeline.evaluate(*own.inputs, target=own.target)
        return step_task(pipeline, own) if seed is None else error_of(step_task, pipeline, own)

    for found in on_pipelines(2, own, case, seed=seed):
        assert seed is None or "disagree on step_number: rank 0 has 4, rank 1 has 5" in str(found)


def test_without_a_seed_nothing_is_set():
    layer, inputs = dropping(1), values(1, 3, WIDTH, dtype=FLOAT64)
    pipeline = Pipeline([layer], "1f1b", 1, square_loss)

    torch.manual_seed(1)
    expected = layer(inputs).detach()
    torch.manual_seed(1)
    result = pipeline.step(inputs, target=expected, return_outputs=True)

    assert torch.equal(result.outputs, expected)
    assert (expected == 0).any()


def test_the_callers_generator_and_evaluation_know_nothing_of_it():
    own = task()
    pipeline = pipeline_of(None, own)
    torch.manual_seed(1)
    expected = torch.rand(4)

    torch.manual_seed(1)
    evaluations = []
    for _ in range(2):
        evaluations.append(pipeline.evaluate(*own.inputs, target=own.target).loss)
        pipeline.step(*own.inputs, target=own.target)

    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(*evaluations)
    assert pipeline.step_number == 2


def test_what_draws_in_evaluation_draws_from_the_callers_generator():
    own = task(noisy_loss)
    pipeline = pipeline_of(None, own)

    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(pipeline.evaluate(*own.inputs, target=own.target).loss)

    assert torch.equal(losses[0], losses[2])
    assert not torch.equal(losses[0], losses[1])


def test_a_step_that_failed_draws_the_same_when_it_is_run_again():
    def fail(layer, inputs):
        raise ZeroDivisionError

    def wrong(pipeline):
        last = [layer for stage in pipeline.stages for name, layer in stage.layers.items() if name == "7"]
        hooks = [layer.register_forward_pre_hook(fail) for layer in last]
        try:
            pipeline.step(*own.inputs, target=own.target)
        finally:
            for hook in hooks:
                hook.remove()

    own = task()

    assert_errors(errors_before_a_right_step(2, own, wrong, "1f1b", NUM_MICROBATCHES), PipelineError)
