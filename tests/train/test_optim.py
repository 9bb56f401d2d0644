"""The optimizer's groups and the learning rate."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.train.optim import OptimizerOptions, build_optimizer, learning_rate_at

OPTIONS = OptimizerOptions(learning_rate=1e-2, total_steps=10, warmup_steps=4, minimum_fraction=0.1)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), nn.Linear(2, 3))

    optimizer = build_optimizer(model.named_parameters(), OPTIONS)

    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decay == {"0.weight": 0.1, "2.weight": 0.1, "1.weight": 0.0, "1.bias": 0.0, "2.bias": 0.0}


def test_the_options_reach_adamw():
    parameter = nn.Parameter(torch.tensor([2.0]))
    options = OptimizerOptions(learning_rate=0.5, total_steps=1, beta1=0.8, beta2=0.7, epsilon=0.25)
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
    rates = [learning_rate_at(step, OPTIONS) for step in range(1, 13)]

    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[6] == pytest.approx(0.01 * (0.1 + 0.9 * 0.5))  # half-way
    assert rates[9:] == pytest.approx([0.001] * 3)
    assert all(before > after for before, after in pairwise(rates[3:10]))


def test_without_warm_up_or_without_decay_the_rate_is_defined():
    no_warmup = OptimizerOptions(learning_rate=1.0, total_steps=4, warmup_steps=0, minimum_fraction=0.0)
    no_decay = OptimizerOptions(learning_rate=1.0, total_steps=4, warmup_steps=4)

    assert [learning_rate_at(step, no_warmup) for step in (2, 4)] == pytest.approx([0.5, 0.0])
    assert [learning_rate_at(step, no_decay) for step in (2, 4)] == pytest.approx([0.5, 1.0])


def test_a_run_that_is_shorter_than_its_warm_up_ends_on_the_way():
    short = OptimizerOptions(learning_rate=1.0, total_steps=2, warmup_steps=4)

    assert [learning_rate_at(step, short) for step in (1, 2)] == pytest.approx([0.25, 0.5])


def test_steps_are_counted_from_1():
    with pytest.raises(PenstockError, match="step 0 has no learning rate"):
        learning_rate_at(0, OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate: 0.0 is out of range; expected a finite number, larger than 0"),
        ({"learning_rate": 1e39}, r"learning_rate: 1e\+39 .* at most 1000"),
        ({"learning_rate": math.nan}, "learning_rate: nan"),
        ({"total_steps": 0}, "total_steps: 0"),
        ({"warmup_steps": -1}, "warmup_steps: -1 is out of range; .* 0 or larger"),
        ({"minimum_fraction": 1.5}, "minimum_fraction: 1.5"),
        ({"beta1": 1.0}, "beta1: 1.0"),
        ({"beta2": -0.1}, "beta2: -0.1"),
        ({"weight_decay": math.inf}, "weight_decay: inf"),
        ({"epsilon": -1.0}, "epsilon: -1.0"),
        ({"clip_norm": -1.0}, "clip_norm: -1.0"),
    ],
)
def test_options_out_of_range_are_refused(change, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        OptimizerOptions(**({"learning_rate": 1e-2, "total_steps": 10} | change))
