"""Sharded pipelines whose ranks are processes, with a scaler."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import penstock as ps
from tests.acceptance.replicas.test_replica_processes import DEADLINE_S
from tests.support.local_pipelines import WIDTH, settle, square_loss, values
from tests.support.mesh_pipelines import MICROBATCHES, Job, device_mesh
from tests.support.ranks import run_ranks
from tests.support.sharded_pipelines import NONE, OPTIMIZER, TWO, ways

# ---- a scaler


class InfiniteGradient(torch.autograd.Function):
    """Makes row 4 of a gradient infinite, which of two replicas the second one has."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[4, 0] = float("inf")
        return gradient


class Overflowing(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH), seed)
        self.overflows = False

    def forward(self, x):
        weight = self.linear.weight
        return nn.functional.linear(x, InfiniteGradient.apply(weight) if self.overflows else weight, self.linear.bias)


def scaled_job():
    job = Job([8, 8], lambda: [Overflowing(seed) for seed in range(8)])
    targets = values(2, 16, WIDTH)
    job.inputs, job.targets = (lambda rows: values(1, rows, WIDTH)), (lambda _: targets)
    return job


def scaled(rank, pipeline, data, setting):
    """Train with a scaler, and in two of the steps the last replica has an infinite value in one row of one weight."""
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    job = scaled_job()
    options = {"scale_loss": scaler.scale, "deadline_s": DEADLINE_S, "mesh": device_mesh(pipeline, data)}
    microbatches = MICROBATCHES * (2 // data)
    layers = job.make_layers()
    with ps.Pipeline(layers, "interleaved-1f1b", microbatches, square_loss, **options, **setting) as own:
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05, foreach=True)
        inputs, target = job.of(own.replica) if data == 2 else (job.inputs(16), job.targets(16))
        found = []
        for step in range(8):
            layers[2].overflows = step in (1, 4) and own.replica == data - 1
            loss = own.step(inputs, target=target).loss
            scaler.unscale_(optimizer)
            norm = own.clip_grad_norm_(1.0).item()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((loss.item(), scaler.get_scale(), norm if norm < float("inf") else -1.0))
        weights = {}
        for name, each in own.named_parameters():
            weights[name] = (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        return found, weights


@pytest.fixture(scope="module")
def alone():
    """The history of one process, and its weights."""
    return run_ranks(1, scaled, 1, 1, NONE)[0]


@ways("setting", (TWO,), slow=[(NONE,), (OPTIMIZER,)])
def test_a_scaler_that_overflows_on_one_replica_takes_one_decision_for_all(four_ranks, alone, setting):
    ranks = four_ranks.run(scaled, 2, 2, setting)

    scales = [scale for _, scale, _ in alone[0]]
    assert sum(later < scale for scale, later in pairwise(scales)) == 2
    for history, weights in ranks:
        assert history == ranks[0][0]
        assert [scale for _, scale, _ in history] == scales
        for (loss, _, norm), (known, _, known_norm) in zip(history, alone[0], strict=True):
            assert loss == pytest.approx(known, rel=1e-5)
            assert norm == pytest.approx(known_norm, rel=1e-4) or norm != norm or known_norm != known_norm
        for name, value in weights.items():
            torch.testing.assert_close(value, alone[1][name], rtol=1e-4, atol=1e-5)
