"""Replicas and shards over NCCL, also where the ranks share one GPU (see test_nccl.py)."""

import os
import signal
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.emulated.replicas import ended_by, train_on
from tests.test_nccl import device_of, processes

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(90)]

START_S = 80.0
DEADLINE_S = 4.0
SHARDS = {"shard": "full", "residency": 1}
CASES = [
    (2, 2, {}),
    (2, 2, {"shard": "optimizer"}),
    (2, 2, SHARDS | {"norm": True}),
    (4, 2, {"run_ahead": 2, "norm": True}),
    (4, 2, {"schedule": "interleaved-1f1b"} | SHARDS),
    (4, 2, {"schedule": "zbv", "run_ahead": 2} | SHARDS),
    (4, 2, {"fails": True}),
    (4, 2, {"fails": True} | SHARDS),
]


@pytest.fixture(scope="module")
def pools():
    made = {}

    def pool_of(num_ranks):
        if num_ranks not in made:
            made[num_ranks] = processes(num_ranks)
        return made[num_ranks]

    yield pool_of
    for each in made.values():
        each.close()


def mesh_of(num_replicas, num_ranks, kind):
    sizes = num_replicas, num_ranks // num_replicas
    return init_device_mesh(kind, sizes, mesh_dim_names=("data", "pipeline"))


def trained(rank, num_ranks, num_replicas, kind, options):
    device = torch.device("cpu") if kind == "cpu" else device_of(rank)
    mesh = mesh_of(num_replicas, num_ranks, kind)
    return train_on(mesh, num_replicas, device, is_bad=rank == num_ranks - 1, dtype=torch.float64, **options)


@pytest.mark.parametrize(("num_ranks", "num_replicas", "options"), CASES)
def test_a_training_is_the_cpus(pools, num_ranks, num_replicas, options):
    pool = pools(num_ranks)
    expected = pool.run(trained, num_ranks, num_replicas, "cpu", options, timeout_s=START_S)

    found = pool.run(trained, num_ranks, num_replicas, "cuda", options, timeout_s=START_S)

    expect_close(found, expected)
    for _, _, errors in found:
        assert all("planted" in error for error in errors)
        assert len(errors) == bool(options.get("fails"))


def test_run_ahead_changes_no_bit(pools):
    without, *others = [
        pools(2).run(trained, 2, 2, "cuda", {"run_ahead": ahead} | SHARDS, timeout_s=START_S) for ahead in (None, 1, 2)
    ]

    for each in others:
        for (losses, weights, _), (first_losses, first_weights, _) in zip(each, without, strict=True):
            assert losses == first_losses
            assert all(torch.equal(weights[name], value) for name, value in first_weights.items())


def test_what_shards_saved_they_load(pools, tmp_path):
    options = {"shard": "full", "folder": str(tmp_path)}
    expected = pools(2).run(trained, 2, 2, "cpu", {"shard": "full"}, timeout_s=START_S)

    expect_close(pools(2).run(trained, 2, 2, "cuda", options, timeout_s=START_S), expected)


def expect_close(found, expected):
    """Kernels of a GPU add in another order than those of a CPU."""
    for (losses, weights, _), (cpu_losses, cpu_weights, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(cpu_losses, rel=1e-10)
        assert weights.keys() == cpu_weights.keys()
        for name, value in cpu_weights.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-7, atol=1e-7)


def harmed(rank, num_ranks, num_replicas, harm, options):
    mesh = mesh_of(num_replicas, num_ranks, "cuda")
    is_bad = rank == num_ranks - 1
    return ended_by(mesh, num_replicas, device_of(rank), harm, is_bad=is_bad, deadline_s=DEADLINE_S, **options)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def be_late():
    time.sleep(DEADLINE_S + 2.0)


@pytest.mark.parametrize("options", [{"run_ahead": 2}, {"run_ahead": 2} | SHARDS])
def test_a_replica_that_is_killed_is_named(options):
    with processes(4) as ranks:
        outcome = ranks.attempt(harmed, 4, 2, die, options, timeout_s=START_S)

    assert outcome.exit_codes == {3: -signal.SIGKILL}, str(outcome)
    assert [outcome.results[rank][1] for rank in range(3)] == [3] * 3, str(outcome.results)


@pytest.mark.parametrize("options", [{"run_ahead": 2}, {"run_ahead": 2} | SHARDS])
def test_a_replica_that_is_late_is_named(options):
    with processes(4) as ranks:
        found = ranks.run(harmed, 4, 2, be_late, options, timeout_s=START_S)

    assert [blamed for _, blamed in found] == [3] * 4, str(found)
