"""Evaluation takes the mean over its batches and leaves no trace."""

import pytest

from penstock.train.evaluation import mean_loss
from tests.train.local_ranks import on_ranks, random_batch, small_pipeline


def evaluate(transport, batches, weights=None):
    pipeline = small_pipeline(transport)
    before = {name: parameter.clone() for name, parameter in pipeline.named_parameters()}
    loss = mean_loss(pipeline, batches, weights)
    pipeline.close()
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is None
        assert parameter.equal(before[name])
    return loss


def test_the_loss_is_the_mean_over_the_batches_on_every_rank():
    batches = [random_batch(seed) for seed in range(3)]

    [first], [second], [third] = (on_ranks(1, evaluate, [batch]) for batch in batches)
    losses = on_ranks(2, evaluate, batches)

    assert losses[0] == losses[1] == pytest.approx((first + second + third) / 3, rel=1e-12)
    assert first != second


def test_weights_say_what_each_loss_is_the_mean_of():
    batches = [random_batch(seed) for seed in range(2)]

    [first], [second] = (on_ranks(1, evaluate, [batch]) for batch in batches)

    assert on_ranks(1, evaluate, batches, [1.0, 3.0]) == [pytest.approx((first + 3 * second) / 4, rel=1e-12)]
