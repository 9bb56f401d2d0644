"""The optimizer's groups, the learning rate, and clipping that does not depend on the split."""

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.train.optim import OptimizerOptions, build_optimizer, clip_gradients, learning_rate_at

OPTIONS = OptimizerOptions(learning_rate=1e-2, total_steps=10, warmup_steps=4, minimum_fraction=0.1)
GRADIENTS = {f"blocks.{index}.weight": (index + 1.0) ** 3 * torch.ones(3, 5) / 7 for index in range(7)}
SHARES = st.lists(st.integers(0, 3), min_size=len(GRADIENTS), max_size=len(GRADIENTS))


def clip_on_ranks(gradients_of_ranks, max_norm, skips=None):
    """Clip rank after rank, each seeing the values of all; they travel as JSON, as between processes."""
    skips = skips or [()] * len(gradients_of_ranks)
    sent = []
    for gradients, skip in zip(gradients_of_ranks, skips, strict=True):
        clip_gradients(gradients.items(), lambda own: [sent.append(own)] and [own], 0.0, skip=skip)
    texts = [json.dumps(own) for own in sent]
    return [
        clip_gradients(gradients.items(), lambda _: [json.loads(text) for text in texts], max_norm, skip=skip)
        for gradients, skip in zip(gradients_of_ranks, skips, strict=True)
    ]


def random_gradients():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(33, generator=generator) * 10 for name in GRADIENTS}


def spread(gradients, rank_of_gradient):
    """Deal the gradients out to 4 ranks."""
    ranks = [{} for _ in range(4)]
    for (name, gradient), rank in zip(gradients.items(), rank_of_gradient, strict=True):
        ranks[rank][name] = gradient
    return ranks


def test_clipping_equals_torch():
    gradients = random_gradients()
    parameters = [nn.Parameter(torch.zeros(33)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()

    expected = nn.utils.clip_grad_norm_(parameters, 1.5)
    (norm,) = clip_on_ranks([gradients], 1.5)

    assert norm == pytest.approx(expected.item())
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@given(rank_of_gradient=SHARES)
def test_norm_and_clipped_gradients_have_the_same_bits_whatever_the_split(rank_of_gradient):
    unsplit, split = random_gradients(), random_gradients()
    (expected,) = clip_on_ranks([unsplit], 1.0)

    norms = clip_on_ranks(spread(split, rank_of_gradient), 1.0)

    assert norms == [expected] * 4
    assert all(torch.equal(split[name], unsplit[name]) for name in unsplit)


def test_a_small_norm_leaves_the_gradients_alone():
    gradients = random_gradients()

    (norm,) = clip_on_ranks([gradients], 1e6)

    assert 0 < norm < 1e6
    assert all(torch.equal(gradients[name], gradient) for name, gradient in random_gradients().items())


def test_a_limit_of_zero_only_measures():
    gradients = random_gradients()

    (norm,) = clip_on_ranks([gradients], 0.0)

    assert norm > 0
    assert all(torch.equal(gradients[name], gradient) for name, gradient in random_gradients().items())


def test_a_tied_copy_is_counted_once_and_scaled_everywhere():
    ranks = [{"embedding.weight": torch.full((4,), 3.0)}, {"head.weight": torch.full((4,), 3.0)}]

    norms = clip_on_ranks(ranks, 3.0, skips=[(), ("head.weight",)])

    assert norms == [6.0, 6.0]
    for gradients in ranks:
        for gradient in gradients.values():
            torch.testing.assert_close(gradient, torch.full((4,), 1.5))


def test_a_name_on_two_ranks_is_counted_once():
    norms = clip_on_ranks([{"a": torch.full((4,), 3.0)}, {"a": torch.full((4,), 3.0)}], 100.0)

    assert norms == [6.0, 6.0]


def test_a_gradient_that_two_names_share_is_counted_and_scaled_once():
    shared = torch.full((4,), 3.0)

    (norm,) = clip_on_ranks([{"embedding.weight": shared, "head.weight": shared}], 3.0)

    assert norm == 6.0
    torch.testing.assert_close(shared, torch.full((4,), 1.5))


def test_parameters_without_gradient_and_ranks_without_parameters_are_fine():
    ranks = [{}, {"a": None, "b": torch.tensor([3.0, 4.0])}]

    assert clip_on_ranks(ranks, 1.0) == [5.0, 5.0]
    torch.testing.assert_close(ranks[1]["b"], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_returned_and_nothing_is_scaled(value):
    ranks = [{"a": torch.tensor([value])}, {"b": torch.tensor([5.0])}]

    norms = clip_on_ranks(ranks, 1.0)

    assert not any(math.isfinite(norm) for norm in norms)
    assert ranks[1]["b"].item() == 5.0


def test_squares_beyond_float32_are_counted():
    (norm,) = clip_on_ranks([{"a": torch.tensor([3e30, 4e30])}], 1.0)

    assert norm == pytest.approx(5e30)


def test_half_precision_gradients_are_measured_in_full():
    (norm,) = clip_on_ranks([{"a": torch.ones(10_001, dtype=torch.bfloat16)}], 0.0)

    assert norm == pytest.approx(math.sqrt(10_001), rel=1e-12)


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
        ({"warmup_steps": 11}, "warmup_steps: 11 is out of range; .* from 0 to total_steps = 10"),
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
