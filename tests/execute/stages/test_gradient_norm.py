"""The norm of the gradients of all ranks, and clipping that does not depend on the split."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.execute.stages.gradient_norm import clip_gradients

GRADIENTS = {f"blocks.{index}.weight": (index + 1.0) ** 3 * torch.ones(3, 5) / 7 for index in range(7)}
SHARES = st.lists(st.integers(0, 3), min_size=len(GRADIENTS), max_size=len(GRADIENTS))


def clip_on_ranks(gradients_of_ranks, max_norm, skips=None, norm_type=2.0):
    """Clip rank after rank, each seeing the values of all; they travel as JSON, as between processes."""
    ranks = list(zip(gradients_of_ranks, skips or [()] * len(gradients_of_ranks), strict=True))
    sent = []

    def clip(exchange, limit):
        return [
            clip_gradients(gradients.items(), exchange, limit, skip=skip, norm_type=norm_type)
            for gradients, skip in ranks
        ]

    clip(lambda own: [sent.append(own)] and [own], 0.0)
    texts = [json.dumps(own) for own in sent]
    return clip(lambda _: [json.loads(text) for text in texts], max_norm)


def clipped_by_torch(gradients, max_norm, norm_type):
    """Return the norm and the clipped gradients of the unsplit model."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return float(norm), [parameter.grad for parameter in parameters]


def random_gradients():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(33, generator=generator) * 10 for name in GRADIENTS}


def spread(gradients, rank_of_gradient):
    """Deal the gradients out to 4 ranks."""
    ranks = [{} for _ in range(4)]
    for (name, gradient), rank in zip(gradients.items(), rank_of_gradient, strict=True):
        ranks[rank][name] = gradient
    return ranks


@pytest.mark.feature("X42")
@given(rank_of_gradient=SHARES)
def test_norm_and_clipped_gradients_have_the_same_bits_whatever_the_split(rank_of_gradient):
    unsplit, split = random_gradients(), random_gradients()
    (expected,) = clip_on_ranks([unsplit], 1.0)

    norms = clip_on_ranks(spread(split, rank_of_gradient), 1.0)

    assert norms == [expected] * 4
    assert all(torch.equal(split[name], unsplit[name]) for name in unsplit)


@pytest.mark.parametrize("max_norm", [1e6, 0.0], ids=["above the norm", "zero, which only measures"])
def test_some_limits_leave_the_gradients_alone(max_norm):
    gradients = random_gradients()

    (norm,) = clip_on_ranks([gradients], max_norm)

    assert 0 < norm < 1e6
    assert all(torch.equal(gradients[name], gradient) for name, gradient in random_gradients().items())


def threes():
    return torch.full((4,), 3.0)


HELD_TWICE = {
    "a tied copy": (lambda: [{"first": threes()}, {"last": threes()}], [(), ("last",)]),
    "one name on two ranks": (lambda: [{"first": threes()}, {"first": threes()}], None),
    "two names of one gradient": (lambda: [dict.fromkeys(("first", "last"), threes())], None),
}
"""The gradients of ranks, and what each is to skip."""


@pytest.mark.parametrize("how", HELD_TWICE)
def test_what_is_held_twice_is_counted_once_and_scaled_once_everywhere(how):
    make_ranks, skips = HELD_TWICE[how]
    ranks = make_ranks()

    norms = clip_on_ranks(ranks, 3.0, skips)

    assert norms == [6.0] * len(ranks)
    for gradients in ranks:
        for gradient in gradients.values():
            torch.testing.assert_close(gradient, torch.full((4,), 1.5))


def test_parameters_without_gradient_and_ranks_without_parameters_are_fine():
    ranks = [{}, {"a": None, "b": torch.tensor([3.0, 4.0])}]

    assert clip_on_ranks(ranks, 1.0) == [5.0, 5.0]
    torch.testing.assert_close(ranks[1]["b"], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_scales_every_gradient_as_torch_does(value, norm_type):
    ranks = [{"a": torch.tensor([value, 2.0])}, {"b": torch.tensor([5.0])}]
    _, expected = clipped_by_torch([ranks[0]["a"], ranks[1]["b"]], 1.0, norm_type)

    norms = clip_on_ranks(ranks, 1.0, norm_type=norm_type)

    assert not any(math.isfinite(norm) for norm in norms)
    torch.testing.assert_close([ranks[0]["a"], ranks[1]["b"]], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("max_norm", [math.inf, 0.0])
def test_a_limit_that_only_measures_scales_by_no_norm_that_is_not_finite(max_norm):
    ranks = [{"a": torch.tensor([math.inf])}, {"b": torch.tensor([5.0])}]

    assert clip_on_ranks(ranks, max_norm) == [math.inf, math.inf]
    assert [ranks[0]["a"].item(), ranks[1]["b"].item()] == [math.inf, 5.0]


@pytest.mark.parametrize("ranks", [[0] * 7, [0, 1, 2, 3, 0, 1, 2]], ids=["one holds all", "four hold some"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_every_norm_and_its_clipped_gradients_are_those_of_torch(norm_type, ranks):
    gradients = random_gradients()
    norm, expected = clipped_by_torch(gradients.values(), 1.5, norm_type)

    norms = clip_on_ranks(spread(gradients, ranks), 1.5, norm_type=norm_type)

    assert norms == [pytest.approx(norm, rel=1e-6)] * 4
    torch.testing.assert_close(list(gradients.values()), expected)


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        (torch.tensor([3e30, 4e30]), 5e30),
        (torch.ones(10_001, dtype=torch.bfloat16), math.sqrt(10_001)),
        (torch.sparse_coo_tensor([[1, 1]], [3.0, 0.0], (4,)), 3.0),
        (torch.tensor([4j]), 4.0),
    ],
    ids=["squares beyond float32", "half precision", "sparse", "complex"],
)
def test_gradients_of_every_kind_are_measured_in_full(gradients, norm):
    assert clip_on_ranks([{"a": gradients}, {}], 0.0) == [pytest.approx(norm, rel=1e-7)] * 2


class Waits(TorchDispatchMode):
    """Counts what waits for a device: a scalar that is read, or a copy to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket is torch.ops.aten._local_scalar_dense
        return function(*args, **kwargs or {})


def test_clipping_waits_for_no_parameter_by_itself():
    named = [(f"parameter {number}", torch.ones(3)) for number in range(50)]

    with Waits() as waits:
        clip_gradients(named, lambda own: [own], 0.5)
        torch.ones(()).item()

    assert waits.count == 1  # the one of this test; all norms are read as one list
