"""Weighted losses of microbatches add up to the loss of the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import ConfigError, PipelineError
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.losses.loss import LossShares, LossWeights, apply_scale, combine_losses, loss_scale


def of_sizes(*sizes, targets=None):
    targets = targets or [None] * len(sizes)
    return [Microbatch(index, (), {}, targets[index], size) for index, size in enumerate(sizes)]


def shares_of(weights, microbatches, slices):
    return weights.shares_of(weights.measure(microbatches, slices))


def microbatch_weights(microbatches, reduction="mean", count=None):
    return shares_of(LossWeights(reduction, count), microbatches, [[each] for each in microbatches]).weights


@given(st.integers(1, 500), st.integers(1, 64))
def test_a_mean_weighs_by_rows_if_there_are_any_and_exactly_by_one_over_m_if_they_are_even_and_a_sum_by_one(size, m):
    assert microbatch_weights(of_sizes(*[size] * m), "mean") == [1 / m] * m
    assert microbatch_weights(of_sizes(*[0] * m), "mean") == [1 / m] * m
    assert microbatch_weights(of_sizes(3, 3, 2), "mean") == [3 / 8, 3 / 8, 2 / 8]
    assert microbatch_weights(of_sizes(size, m), "sum") == [1.0, 1.0]


@pytest.mark.feature("E14", "X39")
def test_a_count_weighs_by_what_it_counts():
    targets = [torch.tensor([1, -100, 2]), torch.tensor([5, 6, 7]), torch.tensor([-100, -100, -100])]

    weights = microbatch_weights(of_sizes(3, 3, 3, targets=targets), count=lambda target: (target != -100).sum())

    assert weights == [2 / 5, 3 / 5, 0.0]
    assert all(type(weight) is float for weight in weights)
    assert microbatch_weights(of_sizes(1, 1), count=lambda target: 0) == [0.0, 0.0]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_wrong_count_names_its_microbatch_and_one_that_slices_do_not_share_their_counts(bad):
    with pytest.raises(PipelineError, match=f"microbatch 1: count returned {bad}"):
        microbatch_weights(of_sizes(1, 1, targets=[1.0, bad]), count=float)
    parts = whole_and_slices([3, 2], [torch.zeros(3), torch.zeros(2)])
    with pytest.raises(PipelineError, match=r"microbatch 0: count returned 1 .* but \[1.0, 1.0\] for .* its slices"):
        shares_of(LossWeights(count=lambda target: 1), *parts)


def test_each_name_of_a_count_has_its_own_shares():
    targets = [torch.tensor([3, 1]), torch.tensor([1, 0])]
    microbatches = of_sizes(1, 1, targets=targets)
    shares = shares_of(
        LossWeights(count=lambda target: {"a": target[0], "b": target[1]}),
        microbatches,
        [[part] for part in microbatches],
    )

    assert {name: named.weights for name, named in shares.by_name.items()} == {"a": [0.75, 0.25], "b": [1.0, 0.0]}
    assert shares.weights == [0.8, 0.2]
    assert (shares.named_factors(1, 0), shares.count(0, 0)) == ({"a": 0.25, "b": 0.0}, {"a": 3.0, "b": 1.0})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([{}], "microbatch 0: count returned an empty dict"),
        ([{"a": 1}, {"a": -1}], "microbatch 1: count returned -1.0 for its target as 'a'"),
        ([{"a": 1}, {"b": 1}], "microbatch 1: count returned numbers for 'b' .* but numbers for 'a' for that of"),
        ([1, {"b": 1}], "microbatch 1: count returned numbers for 'b' .* but a number for that of microbatch 0"),
    ],
)
def test_counts_that_do_not_fit_each_other_are_refused(values, told):
    with pytest.raises(PipelineError, match=told):
        microbatch_weights(of_sizes(*[1] * len(values), targets=values), count=lambda target: target)


def test_a_wrong_reduction_is_refused_before_any_step():
    with pytest.raises(ConfigError, match=r"reduction: 'maen'.*Did you mean 'mean'\?"):
        LossWeights("maen")
    with pytest.raises(ConfigError, match="count: a sum is not divided"):
        LossWeights("sum", count=len)


def test_losses_are_added_in_order_and_in_their_own_dtype():
    losses = [torch.tensor(value, requires_grad=True) for value in (1e8, 1.0, -1e8)]

    total = combine_losses(losses, [1.0, 1.0, 1.0])

    assert total.dtype == torch.float32
    assert total == 0.0  # (1e8 + 1) - 1e8 in float32; any other order gives 1
    assert not total.requires_grad
    for num_losses, num_weights in ((0, 0), (1, 2)):
        with pytest.raises(PipelineError, match=f"{num_losses} losses for {num_weights} weights"):
            combine_losses([torch.tensor(1.0)] * num_losses, [1.0] * num_weights)


# ---- scaling


def test_a_number_and_a_function_scale_alike():
    loss = torch.tensor(3.0, requires_grad=True)

    for scale in (4.0, 4, lambda loss: loss * 4.0, lambda loss: (loss * 4.0).reshape(1)):
        scaled = apply_scale(loss_scale(scale), loss)
        assert (scaled.item(), scaled.shape, scaled.requires_grad) == (12.0, (), True)
    assert loss_scale(None) is None
    for scale in (0, -2.0, math.inf, math.nan, "2", [2]):
        with pytest.raises(ConfigError, match=r"scale_loss: .* scales no loss"):
            loss_scale(scale)


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (float, "a float"),
        (Tensor.detach, r"a tensor of shape \(\) without a gradient"),
        (lambda loss: loss.expand(2), r"a tensor of shape \(2,\) with a gradient"),
    ],
)
def test_what_a_backward_cannot_begin_at_is_refused(scale, found):
    with pytest.raises(PipelineError, match=f"scale_loss returned {found} for a loss with one; return the loss times"):
        apply_scale(scale, torch.tensor(3.0, requires_grad=True))


# ---- slices


def whole_and_slices(lengths, targets=None):
    target = None if targets is None else torch.cat(targets)
    targets = targets or [None] * len(lengths)
    parts = [Microbatch(0, (), {}, targets[q], 2, q, length) for q, length in enumerate(lengths)]
    return [Microbatch(0, (), {}, target, 2)], [parts]


def test_a_slice_weighs_by_its_length_or_by_what_its_target_counts_and_one_in_a_sum():
    targets = [torch.tensor([1, 0, 1]), torch.tensor([0, 0]), torch.tensor([1, 1])]

    by_length = shares_of(LossWeights(), *whole_and_slices([2, 1, 1]))
    counted = shares_of(LossWeights(count=torch.sum), *whole_and_slices([3, 2, 2], targets))
    whole = shares_of(LossWeights(count=torch.sum), *whole_and_slices([3], targets[:1]))

    assert by_length == LossShares([1.0], [[0.5, 0.25, 0.25]])
    assert by_length.count(0, 1) is None
    assert counted.fractions == [[0.5, 0.0, 0.5]]
    assert [counted.count(0, index) for index in range(3)] == [2.0, 0.0, 2.0]
    assert (whole.fractions, whole.count(0, 0)) == ([[1.0]], 2.0)
    assert shares_of(LossWeights("sum"), *whole_and_slices([2, 1])).fractions == [[1.0, 1.0]]
    assert LossShares([0.25, 0.75], [[0.5, 0.5], [0.2, 0.8]]).factor(1, 1) == 0.75 * 0.8
    for count, factor in ((None, 0.5), (lambda target: 0, 0.0)):  # slices that count nothing weigh all the same
        shares = shares_of(LossWeights(count=count), *whole_and_slices([0, 0]))
        assert (shares.fractions, shares.factor(0, 1)) == ([[0.5, 0.5]], factor)


def test_losses_of_layers_weigh_by_rows_and_lengths_whatever_counts():
    weights = LossWeights(count=lambda target: 0 / 0)
    microbatches = of_sizes(3, 1)

    shares = shares_of(weights.of_rows, microbatches, [[each] for each in microbatches])

    assert shares == LossShares([0.75, 0.25], [[1.0], [1.0]])
    assert shares_of(weights.of_rows, *whole_and_slices([3, 1])).fractions == [[0.75, 0.25]]
    assert shares_of(LossWeights("sum").of_rows, microbatches, [[each] for each in microbatches]).weights == [1.0, 1.0]
