"""Steps that change nothing: dry runs, and numbers that are not finite, with the place where they began."""

import logging
import math
import re

import pytest
import torch

from penstock.errors import NotFinite
from penstock.execute.parameters import tied
from penstock.execute.parameters.gradient_sums import sum_over
from penstock.models import cross_entropy_loss
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.sections import OptimizerSection, PrecisionSection
from penstock.train.step import Trainer
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.local_ranks import on_small_pipelines, random_batch, small_layers, small_pipeline

OPTIONS = OptimizerSection(learning_rate=1e-2, warmup_steps=4, clip_norm=0.5)
NUM_STEPS = 10


def trainer_of(pipeline, **precision):
    return Trainer(pipeline, OPTIONS, num_steps=NUM_STEPS, **precision)


@pytest.mark.feature("A16", "E12")
def test_a_dry_run_changes_no_weight_and_tells_the_same_losses():
    batches = [[random_batch(step)] for step in range(2)]

    def steps(skip_update):
        def case(pipeline):
            trainer = trainer_of(pipeline)
            before = [parameter.detach().clone() for parameter in pipeline.parameters()]
            outcomes = [trainer.step(n, each, skip_update=skip_update) for n, each in enumerate(batches, start=1)]
            gradients = [parameter.grad for parameter in pipeline.parameters()]
            return outcomes, all(map(torch.equal, pipeline.parameters(), before)), gradients

        return on_small_pipelines(2, case)

    for (dry, is_same, gradients), (real, is_same_after_all, _) in zip(steps(True), steps(False), strict=True):
        assert (is_same, is_same_after_all) == (True, False)
        assert [outcome.is_updated for outcome in dry] == [False, False]
        assert [outcome.is_updated for outcome in real] == [True, True]
        assert dry[0].loss == real[0].loss
        assert (dry[0].gradient_norm, real[0].gradient_norm is None) == (None, False)
        assert dry[1].loss != real[1].loss
        assert set(gradients) == {None}


@pytest.mark.feature("E12")
def test_a_dry_run_sums_no_gradient_of_a_tied_weight_over_ranks(monkeypatch):
    sums = []
    monkeypatch.setattr(tied, "sum_over", lambda *given: sums.append(given) or sum_over(*given))

    def losses(skip_update):
        def case(pipeline):
            return trainer_of(pipeline).step(1, [random_batch(0)], skip_update=skip_update).loss

        return on_small_pipelines(2, case, small_layers(tied_head=True))

    dry = losses(True)
    assert sums == []
    assert losses(False) == dry
    assert len(sums) == 2


def skipping(**options):
    return Precision(PrecisionSection(not_finite="skip", **options))


@pytest.mark.feature("X41")
def test_by_setting_a_step_that_is_not_finite_is_skipped_on_all_ranks():
    def case(transport):
        factor = [1.0]
        pipeline = small_pipeline(transport, loss=lambda logits, target: cross_entropy_loss(logits, target) * factor[0])
        trainer = trainer_of(pipeline, precision=skipping())
        told = []
        for number in (1, 2, 3):
            before = [parameter.detach().clone() for parameter in pipeline.parameters()]
            factor[0] = math.nan if number == 2 else 1.0
            outcome = trainer.step(number, [random_batch(number)])
            is_same = all(map(torch.equal, pipeline.parameters(), before))
            told.append((math.isfinite(outcome.loss), outcome.is_updated, is_same, trainer.update.num_skipped))
        pipeline.close()
        return told

    expected = [(True, True, False, 0), (False, False, True, 1), (True, True, False, 1)]
    assert on_ranks(2, case) == [expected] * 2


def test_too_many_skipped_steps_in_a_row_end_the_run():
    def loss(logits, target):
        return cross_entropy_loss(logits, target) * math.nan

    def case(pipeline):
        trainer = trainer_of(pipeline, precision=skipping(most_skipped=3))
        outcomes = [trainer.step(number, [random_batch(number)]) for number in (1, 2)]
        error = error_of(trainer.step, 3, [random_batch(3)])
        return [outcome.is_updated for outcome in outcomes], type(error), str(error)

    (updated, kind, text), other = on_small_pipelines(2, case, loss=loss)

    assert (updated, kind) == ([False, False], NotFinite)
    assert text == other[2]
    assert text.startswith("step 3: 3 steps in a row were skipped (precision.most_skipped), the loss is nan")


# ---- where it began


@pytest.mark.feature("E11")
@pytest.mark.parametrize(("compute", "schedule"), [("model", "1f1b"), ("bfloat16", "zb-h1")])
def test_the_message_names_rank_stage_microbatch_and_tensor_of_the_first_bad_gradient(compute, schedule):
    """A weight of the first rank has a bad gradient in microbatch 2 of the second batch."""
    precision = Precision(PrecisionSection(compute=compute))

    def case(pipeline):
        weight = dict(pipeline.named_parameters()).get("blocks.1.attention.value.weight")
        calls = []
        if weight is not None:
            # eight backwards of the step, then those of the search: microbatch 2 of the second batch
            weight.register_hook(lambda gradient: calls.append(0) or gradient * bad(len(calls)))
        error = error_of(trainer_of(pipeline, precision=precision).step, 3, [random_batch(0), random_batch(1)])
        return type(error), str(error)

    def bad(number_of_call):
        return math.nan if number_of_call % 8 == 7 else 1.0

    layers = precision.cast(small_layers())
    options = {"schedule": schedule, "main_gradients": precision.has_main_weights, "scale_loss": 0.5}
    first, second = on_small_pipelines(2, case, layers, **options)

    assert first == second
    assert first[0] is NotFinite
    where = "on rank 0, stage 0, microbatch 2, in 0[BIW]2: the gradient of 'blocks.1.attention.value.weight' has"
    assert re.search(where, first[1])
    assert ", batch 2 of 2. The learning rate was" in first[1]


def test_a_bad_activation_is_named_with_its_layer():
    def case(pipeline):
        layers = {name: layer for stage in pipeline.stages for name, layer in stage.layers.items()}
        norm = layers.get("norm")
        if norm is not None:
            with torch.no_grad():
                norm.weight.fill_(math.inf)
        return str(error_of(trainer_of(pipeline).step, 3, [random_batch(0)]))

    first, second = on_small_pipelines(2, case)

    assert first == second
    assert first.startswith("step 3: the loss is nan")
    assert "It begins on rank 1, stage 1, microbatch 0, in 1F0: the output of layer 'norm' has" in first


def test_a_skipped_step_tells_where_it_began_and_training_goes_on(caplog):
    def case(pipeline):
        weight, is_bad = dict(pipeline.named_parameters()).get("head.weight"), [True]
        if weight is not None:
            weight.register_hook(lambda gradient: gradient * (math.nan if is_bad[0] else 1.0))
        trainer = trainer_of(pipeline, precision=skipping())
        outcomes = [trainer.step(1, [random_batch(0)])]
        is_bad[0] = False
        outcomes += [trainer.step(number, [random_batch(number)]) for number in (2, 3)]
        return [(outcome.is_updated, math.isfinite(outcome.gradient_norm)) for outcome in outcomes]

    with caplog.at_level(logging.WARNING, "penstock"):
        results = on_small_pipelines(2, case)

    assert results == [[(False, False), (True, True), (True, True)]] * 2
    told = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1 is skipped. It begins on rank 1, stage 1, microbatch 0, in 1B0: the gradient of")
