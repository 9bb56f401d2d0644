"""Training gives the same weights, bit for bit, on any number of ranks: that of plain gradient accumulation."""

import pytest
import torch

from penstock.execute.stages.gradient_norm import clip_gradients
from penstock.models import count_target_tokens, cross_entropy_loss
from penstock.train.optimizing.optim import build_optimizer
from penstock.train.settings.sections import OptimizerSection
from penstock.train.settings.steps import learning_rate_at
from penstock.train.step import Trainer
from tests.support.local_pipelines import on_ranks
from tests.support.reference import reference_step
from tests.train.local_ranks import random_batch, small_layers, small_pipeline

NUM_STEPS = 10
NUM_MICROBATCHES = 4
OPTIONS = OptimizerSection(learning_rate=1e-2, warmup_steps=5, clip_norm=0.5)

EVEN = {}
RAGGED = {"allow_ragged": True}
BY_TOKENS = {"allow_ragged": True, "count": count_target_tokens}


def batches(weighting):
    """One batch per step; 7 rows do not split evenly, and with tokens counted each row has another number of them."""
    made = []
    for step in range(NUM_STEPS):
        tokens, target = random_batch(step, size=7 if weighting else 8)
        if "count" in weighting:
            for row in range(len(target)):
                target[row, : (row * 3 + step) % 8] = -100
            target[2:4] = -100  # a microbatch without any token
        made.append((tokens, target))
    return made


def train(transport, layers, weighting, schedule="1f1b"):
    pipeline = small_pipeline(transport, layers, schedule=schedule, microbatches=NUM_MICROBATCHES, **weighting)
    trainer = Trainer(pipeline, OPTIONS, num_steps=NUM_STEPS)
    outcomes = [trainer.step(number, [batch]) for number, batch in enumerate(batches(weighting), start=1)]
    pipeline.close()
    weights = {name: parameter.detach() for name, parameter in pipeline.named_parameters()}
    return [(outcome.loss, outcome.gradient_norm) for outcome in outcomes], weights


def train_plainly(layers, weighting):
    """One process, one microbatch after another, no pipeline."""
    modules = {layer.name: layer() for layer in layers}
    if layers[-1].tied:
        modules["head"].weight = modules["embedding"].weight
    parameters = torch.nn.ModuleDict({name.replace(".", "/"): module for name, module in modules.items()})
    named = [(name.replace("/", "."), parameter) for name, parameter in parameters.named_parameters()]
    optimizer = build_optimizer(named, OPTIONS)
    outcomes = []
    for number, (tokens, target) in enumerate(batches(weighting), start=1):
        result = reference_step(
            list(modules.values()), (tokens,), {}, target, loss=cross_entropy_loss, num_microbatches=4, **weighting
        )
        norm = clip_gradients([(name, parameter.grad) for name, parameter in named], lambda own: [own], 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(number, OPTIONS, NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        outcomes.append((result.loss.item(), norm))
    return outcomes, {name: parameter.detach() for name, parameter in named}


def merged(results):
    """Take the outcomes, equal on all ranks, and the weights of all ranks together."""
    outcomes = [outcome for outcome, _ in results]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0], {name: weight for _, weights in results for name, weight in weights.items()}


@pytest.mark.feature("X42", "X47")
@pytest.mark.parametrize(
    ("weighting", "dtype", "schedules"),
    [
        pytest.param(EVEN, "float32", [(1, "1f1b"), (2, "gpipe"), (2, "sequential")], id="even"),
        pytest.param(RAGGED, "float64", [(1, "1f1b"), (3, "1f1b"), (4, "1f1b")], id="ragged", marks=pytest.mark.slow),
        pytest.param(BY_TOKENS, "float32", [(3, "1f1b")], id="by tokens"),
    ],
)
def test_ranks_and_schedules_change_no_bit_of_a_run_with_clipping(weighting, dtype, schedules):
    expected_outcomes, expected = train_plainly(small_layers(dtype), weighting)
    assert sum(norm > OPTIONS.clip_norm for _, norm in expected_outcomes) > NUM_STEPS / 2

    for num_ranks, schedule in schedules:
        outcomes, weights = merged(on_ranks(num_ranks, train, small_layers(dtype), weighting, schedule))

        assert outcomes == expected_outcomes
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_head_tied_over_ranks_differs_by_rounding_alone():
    expected_outcomes, expected = train_plainly(small_layers("float64", tied_head=True), RAGGED)

    for num_ranks in (1, 3):
        outcomes, weights = merged(on_ranks(num_ranks, train, small_layers("float64", tied_head=True), RAGGED))

        found, wanted = (torch.tensor(each, dtype=torch.float64) for each in (outcomes, expected_outcomes))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert weights.get("head.weight", weights["embedding.weight"]).equal(weights["embedding.weight"])
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-12)
