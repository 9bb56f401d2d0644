"""The costs of gathers and reductions between other numbers of replicas."""

from dataclasses import replace

import pytest

from penstock.simulation import Costs
from penstock.simulation.costs.replicas import exchange_s, of_replicas

LINK = {"replica_latency_s": 0.5, "replica_bandwidth_bytes_per_s": 100.0}
SIZED = Costs.uniform(parameter_bytes=(400, 800), gradient_bytes=(200,), optimizer_bytes=(1000,), **LINK)


def test_an_exchange_moves_the_parts_of_the_other_replicas():
    assert exchange_s(SIZED, 400, 1) == 0
    assert exchange_s(SIZED, 400, 2) == 0.5 + 200 / 100
    assert exchange_s(SIZED, 400, 8) == 0.5 + 350 / 100


def test_what_is_not_given_takes_as_long_as_its_bytes():
    shards = of_replicas(SIZED, 4, is_sharded=True)
    whole = of_replicas(SIZED, 4, is_sharded=False)

    assert shards.unshard_s == (0.5 + 3.0, 0.5 + 6.0)
    assert shards.reduce_s == (0.5 + 1.5,)
    assert whole.reduce_s == (2 * (0.5 + 1.5),)  # it gathers the sums as well
    assert (shards.replicas, shards.shards, whole.replicas, whole.shards) == (4, 4, 4, 1)
    assert of_replicas(SIZED, 1, is_sharded=True).unshard_s == (0.0, 0.0)


def test_seconds_that_are_given_for_no_number_of_replicas_stay():
    given = replace(SIZED, unshard_s=(3.0,), reduce_s=(7.0, 8.0))

    for is_sharded in (True, False):
        found = of_replicas(given, 16, is_sharded=is_sharded)
        assert (found.unshard_s, found.reduce_s) == ((3.0,), (7.0, 8.0))


def test_seconds_of_a_number_of_replicas_grow_as_their_exchange_does():
    measured = replace(of_replicas(SIZED, 2, is_sharded=True), unshard_s=(5.0, 9.0))

    found = of_replicas(measured, 4, is_sharded=True)

    assert found.unshard_s == (5.0 * 3.5 / 2.5, 9.0 * 6.5 / 4.5)
    assert found.reduce_s == pytest.approx(of_replicas(SIZED, 4, is_sharded=True).reduce_s)
    assert of_replicas(measured, 2, is_sharded=True) == measured
    assert of_replicas(measured, 1, is_sharded=True).unshard_s == (0.0, 0.0)


def test_without_a_link_seconds_grow_as_the_share_of_the_bytes_that_move():
    measured = Costs.uniform(unshard_s=(3.0,), replicas=4, shards=4)

    assert of_replicas(measured, 2, is_sharded=True).unshard_s == (3.0 * (1 / 2) / (3 / 4),)


def test_a_reduction_for_shards_takes_half_of_one_for_all():
    whole = Costs.uniform(reduce_s=(8.0,), replicas=4)

    assert of_replicas(whole, 4, is_sharded=True).reduce_s == (4.0,)
    assert of_replicas(of_replicas(whole, 4, is_sharded=True), 4, is_sharded=False).reduce_s == (8.0,)
    assert of_replicas(whole, 4, is_sharded=False).reduce_s == (8.0,)
