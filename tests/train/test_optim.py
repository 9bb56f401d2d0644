"""The optimizer's groups and the learning rate."""

import math
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from penstock.errors import PenstockError
from penstock.train.optim import build_optimizer, learning_rate_at
from penstock.train.sections import OptimizerSection

OPTIONS = OptimizerSection(learning_rate=1e-2, warmup_steps=4, minimum_fraction=0.1)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), nn.Linear(2, 3))

    optimizer = build_optimizer(model.named_parameters(), OPTIONS)

    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decay == {"0.weight": 0.1, "2.weight": 0.1, "1.weight": 0.0, "1.bias": 0.0, "2.bias": 0.0}


def test_the_options_reach_adamw():
    parameter = nn.Parameter(torch.tensor([2.0]))
    options = OptimizerSection(learning_rate=0.5, beta1=0.8, beta2=0.7, epsilon=0.25)
    optimizer = build_optimizer([("a", parameter)], options)
    parameter.grad = torch.tensor([3.0])

    optimizer.step()

    # the first step's means are corrected to the gradient and its square
    assert parameter.item() == pytest.approx(2 - 0.5 * 3 / (3 + 0.25))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.7)


def test_copies_of_a_tied_weight_stay_equal_on_separate_ranks():
    values, gradient = torch.randn(5, 3), torch.randn(5, 3)
    embedding, head = (nn.Parameter(values.clone()) for _ in range(2))
    optimizers = [
        build_optimizer([("embedding.weight", embedding)], OPTIONS),
        build_optimizer([("norm.weight", nn.Parameter(torch.ones(3))), ("head.weight", head)], OPTIONS),
    ]

    for optimizer, parameter in zip(optimizers, (embedding, head), strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()

    assert torch.equal(embedding, head)
    assert not torch.equal(embedding, values)


def test_shared_and_frozen_parameters_and_empty_ranks_are_fine():
    shared = nn.Parameter(torch.ones(2, 2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    optimizer = build_optimizer([("a", shared), ("b", shared), ("c", frozen)], OPTIONS)

    assert [group["param_names"] for group in optimizer.param_groups] == [["a"]]
    build_optimizer([], OPTIONS).step()


def test_the_learning_rate_warms_up_and_follows_a_cosine_to_its_floor():
    rates = [learning_rate_at(step, OPTIONS, 10) for step in range(1, 13)]

    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[6] == pytest.approx(0.01 * (0.1 + 0.9 * 0.5))  # half-way
    assert rates[9:] == pytest.approx([0.001] * 3)
    assert all(before > after for before, after in pairwise(rates[3:10]))


def test_without_warm_up_or_without_decay_the_rate_is_defined():
    no_warmup = OptimizerSection(learning_rate=1.0, warmup_steps=0, minimum_fraction=0.0)
    no_decay = OptimizerSection(learning_rate=1.0, warmup_steps=4)

    assert [learning_rate_at(step, no_warmup, 4) for step in (2, 4)] == pytest.approx([0.5, 0.0])
    assert [learning_rate_at(step, no_decay, 4) for step in (2, 4)] == pytest.approx([0.5, 1.0])


def test_a_run_that_is_shorter_than_its_warm_up_ends_on_the_way():
    short = OptimizerSection(learning_rate=1.0, warmup_steps=4)

    assert [learning_rate_at(step, short, 2) for step in (1, 2)] == pytest.approx([0.25, 0.5])


def test_steps_are_counted_from_1():
    with pytest.raises(PenstockError, match="step 0 has no learning rate"):
        learning_rate_at(0, OPTIONS, 10)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", 1e39),
        ("learning_rate", math.nan),
        ("warmup_steps", -1),
        ("minimum_fraction", 1.5),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("weight_decay", math.inf),
        ("epsilon", -1.0),
        ("clip_norm", -1.0),
    ],
)
def test_options_out_of_range_are_refused(key, value):
    with pytest.raises(ValidationError, match=key):
        OptimizerSection(**{key: value})
