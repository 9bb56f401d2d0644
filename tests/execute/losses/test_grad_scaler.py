"""Every rank's scaler sees an overflow of any rank, by public methods alone."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from penstock.execute.control.collectives import Control
from penstock.execute.losses.grad_scaler import SharedScaler, describe_scale, grad_scaler_of
from tests.support.local_pipelines import on_ranks

CPU = torch.device("cpu")
INF = float("inf")


def make_scaler(**options):
    return GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2} | options)


def with_gradient(gradient):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = gradient
    return parameter


def decide(wires, gradients, *, steps=1):
    """Share this rank's gradients and update; return what the optimizers and the scaler did."""
    scaler = make_scaler()
    shared = SharedScaler(scaler, Control(wires), CPU, "grad")
    parameters = [with_gradient(gradient) for gradient in gradients[wires.rank]]
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]
    for _ in range(steps):
        shared.share(parameters)
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        if parameter.grad is not None:
            scaler.step(optimizer)
    scaler.update()
    return [parameter.tolist() for parameter in parameters], shared.scale


def sparse(*entries):
    values = torch.tensor(entries)
    return torch.sparse_coo_tensor(torch.zeros(1, len(entries), dtype=torch.int64), values, (2,), check_invariants=True)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("overflow", [INF, -INF, float("nan")])
def test_an_overflow_of_one_rank_stops_the_optimizers_of_all(overflow, steps):
    gradients = [[torch.ones(2), torch.ones(2)], [torch.tensor([1.0, overflow]), torch.ones(2)], [None]]

    for values, scale in on_ranks(3, lambda wires: decide(wires, gradients, steps=steps)):
        assert values == [[1.0, 1.0]] * len(values)
        assert scale == 4.0


def test_gradients_that_are_finite_once_unscaled_stay_and_optimizers_step():
    gradients = [[sparse(2e38, 2e38)], [sparse(8.0)], [torch.tensor([3e38, -3e38])], [None]]

    found = on_ranks(4, lambda wires: decide(wires, gradients))

    values = [[pytest.approx(-4e38 / 8), 1.0], [0.0, 1.0], [pytest.approx(-3e38 / 8), pytest.approx(3e38 / 8)]]
    assert found == [([own], 8.0) for own in (*values, [1.0, 1.0])]


def test_a_scaler_is_found_behind_its_methods_only():
    scaler = make_scaler()

    assert grad_scaler_of(scaler.scale) is scaler
    assert grad_scaler_of(make_scaler(enabled=False).scale) is None
    assert [grad_scaler_of(scale) for scale in (None, 2.0, lambda loss: loss, "text".join)] == [None] * 4


def test_the_ranks_compare_a_scaler_with_all_its_settings():
    assert describe_scale(make_scaler().scale) == describe_scale(make_scaler().scale)
    assert "'growth_interval': 2" in describe_scale(make_scaler().scale)
    assert [describe_scale(scale) for scale in (None, 2.0, len)] == ["None", "2.0", "a function"]
    assert describe_scale(make_scaler(enabled=False).scale) == "a function"
