"""Replicas on the emulated device: the CPU's losses and weights to the bit, every access ordered, failures on all."""

import pytest
import torch

from tests.emulated.failing_steps import OtherRanks
from tests.emulated.rank_threads import store_of_scenario
from tests.emulated.replicas import ended_by, places_of, train

pytestmark = pytest.mark.emulated

DEADLINE_S = 2.0


def trained(rank, num_ranks, num_replicas, kind, options):
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    return train(rank, num_ranks, num_replicas, device, **options)


def run(emulated, num_ranks, num_replicas, kind, options, policy="lazy", seed=0):
    return emulated.run(
        trained, num_replicas, kind, options, num_ranks=num_ranks, policy=policy, seed=seed, timeout_s=110
    )


@pytest.mark.feature("H1")
@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "options"),
    [
        (3, 3, {"norm": True}),
        (4, 2, {"shard": "optimizer", "fails": True}),
        (4, 2, {"shard": "full", "schedule": "zbv", "residency": 1, "run_ahead": 2}),
        pytest.param(4, 2, {"schedule": "zbv", "run_ahead": 2, "norm": True}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"fails": True}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"shard": "full", "residency": 1, "norm": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), pytest.param("random", 7, marks=pytest.mark.slow)])
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


def late(rank, num_ranks, num_replicas, options):
    """Let the last rank go on when all others have given up."""
    others = OtherRanks(store_of_scenario("ends of steps"), num_ranks)
    device = torch.device("emu", rank)
    places = places_of(rank, num_ranks // num_replicas, num_replicas, device, DEADLINE_S)
    is_bad = rank == num_ranks - 1
    ended = ended_by(places, num_replicas, device, others.wait, is_bad=is_bad, deadline_s=DEADLINE_S, **options)
    others.note_end()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shard": "full", "residency": 1}])
def test_a_late_replica_is_named_also_where_devices_wait_for_it_before_they_come_to_a_collective(emulated, options):
    """Hosts wait for the end of a collective that the devices of two replicas have not begun."""
    found = emulated.run(late, 2, options | {"run_ahead": 2}, num_ranks=4, timeout_s=60)

    assert [blamed for _, blamed in found] == [3] * 4, str(found)
