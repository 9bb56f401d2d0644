"""Every rank gets every loss, bit for bit, whatever the type."""

import pytest
import torch

from penstock.execute.results import share_losses
from penstock.execute.step import Step
from tests.local_pipelines import on_ranks

CPU = torch.device("cpu")


def share(wires, losses, weights, holders=(-1,)):
    step = Step([], weights, None, keeps_outputs=False)
    for microbatch, loss in enumerate(losses):
        if holders[microbatch % len(holders)] % wires.num_ranks == wires.rank:
            step.losses[microbatch] = loss
    return share_losses(wires, step, len(losses), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_losses_arrive_with_their_bits_and_type(dtype):
    losses = [(torch.rand(3, dtype=torch.float64) / 3).to(dtype)[index] for index in range(3)]

    for result in on_ranks(3, share, losses, [0.25, 0.25, 0.5]):
        assert all(map(torch.equal, result.losses, losses))
        assert result.loss.dtype == dtype
        assert torch.equal(result.loss, losses[0] * 0.25 + losses[1] * 0.25 + losses[2] * 0.5)


def test_losses_may_lie_on_different_ranks():
    losses = [torch.tensor(1.5), torch.tensor(2.5)]

    for result in on_ranks(2, share, losses, [0.5, 0.5], (0, 1)):
        assert [float(loss) for loss in result.losses] == [1.5, 2.5]
        assert float(result.loss) == 2.0


def test_a_loss_that_is_not_finite_stays_so_unless_it_weighs_nothing():
    losses = [torch.tensor(float("nan")), torch.tensor(2.0), torch.tensor(float("inf"))]

    weightless = on_ranks(2, share, losses[:2], [0.0, 1.0])
    weighed = on_ranks(2, share, losses[1:], [0.5, 0.5])

    assert [float(result.loss) for result in weightless] == [2.0, 2.0]
    assert all(result.losses[0].isnan() for result in weightless)
    assert [float(result.loss) for result in weighed] == [float("inf")] * 2


def test_without_losses_there_is_no_loss():
    step = Step([], [], None, keeps_outputs=False)

    results = on_ranks(2, lambda wires: share_losses(wires, step, 2, CPU))

    assert [(result.loss, result.losses, result.outputs) for result in results] == [(None, [], None)] * 2
