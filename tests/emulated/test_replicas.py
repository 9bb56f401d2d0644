"""Replicas on the emulated device: the CPU's losses and weights to the bit, every access ordered, failures on all."""

import pytest
import torch

from tests.emulated.replicas import train

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def trained(rank, num_ranks, num_replicas, kind, options):
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    return train(rank, num_ranks, num_replicas, device, **options)


def run(emulated, num_ranks, num_replicas, kind, options, policy="lazy", seed=0):
    return emulated.run(
        trained, num_replicas, kind, options, num_ranks=num_ranks, policy=policy, seed=seed, timeout_s=110
    )


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "options"),
    [
        (2, 2, {}),
        (3, 3, {"norm": True}),
        (4, 2, {"schedule": "zbv"}),
        (4, 2, {"run_ahead": 2, "norm": True}),
        (4, 2, {"fails": True}),
        (2, 2, {"shard": "full", "residency": 1, "norm": True}),
        (4, 2, {"shard": "full", "schedule": "zbv", "residency": 1, "run_ahead": 2}),
        (4, 2, {"shard": "optimizer", "fails": True}),
    ],
)
@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("random", 7)])
def test_a_training_is_the_cpus_to_the_bit(emulated, num_ranks, num_replicas, options, policy, seed):
    without_lead = {name: value for name, value in options.items() if name != "run_ahead"}
    expected = run(emulated, num_ranks, num_replicas, "cpu", without_lead)

    found = run(emulated, num_ranks, num_replicas, "emu", options, policy, seed)

    for (losses, weights, errors), (cpu_losses, cpu_weights, _) in zip(found, expected, strict=True):
        assert losses == cpu_losses
        assert all(torch.equal(weights[name], value) for name, value in cpu_weights.items())
        assert all("planted" in error for error in errors)
        assert len(errors) == bool(options.get("fails"))


def test_what_shards_saved_they_load_to_the_bit(emulated, tmp_path):
    expected = run(emulated, 2, 2, "cpu", {"shard": "full"})

    found = run(emulated, 2, 2, "emu", {"shard": "full", "folder": str(tmp_path)}, "random", 7)

    for (_, weights, _), (_, cpu_weights, _) in zip(found, expected, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in cpu_weights.items())
