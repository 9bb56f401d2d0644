"""New weights of the gradients of a step, or a skipped step."""

import json
import math

import pytest
import torch

from penstock.train.optimizing.precision import Precision, loss_scaler
from penstock.train.optimizing.update import Update
from penstock.train.settings.sections import OptimizerSection, PrecisionSection
from tests.support.local_pipelines import on_ranks
from tests.train.local_ranks import random_batch, small_layers, small_pipeline

OPTIONS = OptimizerSection(learning_rate=1e-2, clip_norm=0.5)


def on_updates(num_ranks, compute, body):
    """Return what `body(pipeline, update)` returned on every rank; their weights are computed with in this type."""
    precision = Precision(PrecisionSection(compute=compute, loss_scale=8.0, loss_scale_growth_steps=2))
    layers, has_main_weights = precision.cast(small_layers()), precision.has_main_weights

    def case(transport):
        scale = loss_scaler(precision, torch.device("cpu")).scale_mean
        with small_pipeline(transport, layers, main_gradients=has_main_weights, scale_loss=scale) as pipeline:
            return body(pipeline, Update(pipeline, OPTIONS, precision))

    return on_ranks(num_ranks, case)


def weights_of(pipeline):
    return [parameter.detach().clone() for parameter in pipeline.parameters()]


def is_unchanged(pipeline, before):
    return all(map(torch.equal, weights_of(pipeline), before))


def run_step(pipeline, update):
    tokens, target = random_batch(0)
    update.begin_batch(1.0)
    pipeline.step(tokens, target=target)
    return update.measure()


@pytest.mark.parametrize("compute", ["model", "bfloat16", "float16"])
def test_a_step_is_applied_at_its_rate_or_skipped_and_forgets_its_gradients(compute):
    def case(pipeline, update):
        before = weights_of(pipeline)
        run_step(pipeline, update)
        update.skip(is_overflow=False)
        is_skipped = is_unchanged(pipeline, before)
        norm = run_step(pipeline, update)
        update.apply(0.125)
        rates = {group["lr"] for group in update.optimizer.param_groups}
        left = [(each.grad, getattr(each, "main_grad", None)) for each in pipeline.parameters()]
        return is_skipped, norm, is_unchanged(pipeline, before), rates, set(left), update.num_skipped

    results = on_updates(2, compute, case)

    assert results[0] == results[1]
    assert results[0] == (True, results[0][1], False, {0.125}, {(None, None)}, 0)
    assert math.isfinite(results[0][1])


@pytest.mark.feature("E11")
def test_an_overflow_lowers_the_scale_of_every_rank_and_two_good_steps_raise_it():
    """Only the second rank has the layer whose gradient overflows."""

    def case(pipeline, update):
        poison = [math.inf if pipeline.transport.rank else 1.0]
        next(pipeline.parameters()).register_hook(lambda gradient: gradient * poison[0])
        before, history = weights_of(pipeline), []
        for step in range(4):
            norm = run_step(pipeline, update)
            if math.isfinite(norm):
                update.apply(0.1)
            else:
                update.skip(is_overflow=True)
            history.append((math.isfinite(norm), update.loss_scale, update.num_skipped, update.num_skipped_in_a_row))
            if step == 0:
                unchanged, poison[0] = is_unchanged(pipeline, before), 1.0
        return history, unchanged, is_unchanged(pipeline, before), update.state()

    results = on_updates(2, "float16", case)

    expected = [(False, 4.0, 1, 1), (True, 4.0, 1, 0), (True, 8.0, 1, 0), (True, 8.0, 1, 0)]
    assert [result[:3] for result in results] == [(expected, True, False)] * 2
    assert results[0][3] == results[1][3]


def test_what_is_no_tensor_is_json_and_goes_on_where_it_is_loaded():
    def save(pipeline, update):
        run_step(pipeline, update)
        update.apply(0.1)
        return json.loads(json.dumps(update.state()))

    def load(pipeline, update):
        update.load_state({**saved, "num_skipped": 3, "num_skipped_in_a_row": 2})
        run_step(pipeline, update)
        update.apply(0.1)
        return update.loss_scale, update.num_skipped, update.num_skipped_in_a_row

    [saved] = on_updates(1, "float16", save)
    assert saved["loss_scaler"]["_growth_tracker"] == 1
    assert on_updates(1, "float16", load) == [(16.0, 3, 0)]


def test_without_float16_there_is_no_scale_to_save():
    def case(pipeline, update):
        update.load_state({"loss_scaler": {"scale": 2.0}, "num_skipped": 0, "num_skipped_in_a_row": 0})
        return update.loss_scale, update.state()["loss_scaler"]

    assert on_updates(1, "bfloat16", case) == [(None, None)]
