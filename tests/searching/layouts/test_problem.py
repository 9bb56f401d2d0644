"""What the layers of a model cost in one layout."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.searching.layouts.problem import measured_costs
from tests.searching.layouts.cases import MIB, costs_of, question


def problem_of(asked, **fields):
    (problem,) = [
        problem
        for problem in asked.problems()
        if all(getattr(problem.layout, name) == value for name, value in fields.items())
    ]
    return problem


ONE_SIZE = {"microbatch_sizes": (1,), "checkpointing": ("none",)}


def test_links_are_those_of_the_layout():
    asked = question(nodes=2, **ONE_SIZE)

    within, across = problem_of(asked, data=2, shard="none"), problem_of(asked, data=4, shard="none")

    assert within.costs.replica_bandwidth_bytes_per_s == 50e9
    assert across.costs.replica_bandwidth_bytes_per_s == 2e9
    assert [channel.bandwidth_bytes_per_s for channel in within.costs.channels] == [2e9, 2e9]
    assert within.costs.bandwidth_bytes_per_s == 50e9


def test_replicas_share_out_bytes_and_the_update():
    asked = question(**ONE_SIZE)
    plain, sharded = (problem_of(asked, data=2, shard=shard) for shard in ("none", "optimizer"))

    np.testing.assert_array_equal(sharded.static_bytes, plain.static_bytes / 2)
    np.testing.assert_allclose(sharded.of_layers("optimizer"), plain.of_layers("optimizer") / 2)
    assert not plain.whole_weights.any()
    assert sharded.whole_weights[1] == 20 * MIB
    assert sharded.resident_costs.optimizer_bytes[1] == 90 * MIB + 20 * MIB


def test_an_update_that_was_measured_of_a_shard_takes_all_of_it_without_shards():
    asked = question(costs=costs_of(optimizer=[1e-3] * 8, shards=4), **ONE_SIZE)
    plain, sharded = (problem_of(asked, data=2, shard=shard) for shard in ("none", "optimizer"))

    np.testing.assert_allclose(plain.of_layers("optimizer"), 4e-3)
    np.testing.assert_allclose(sharded.of_layers("optimizer"), 2e-3)


def test_costs_that_a_device_is_not_known_for_keep_their_own_links():
    asked = question(costs=costs_of(latency_s=3e-3), **ONE_SIZE)
    cluster = type(asked.cluster)(gpus=4, memory_bytes=MIB)

    (problem, *_) = type(asked)(
        cluster=cluster, costs_of=asked.costs_of, global_batch=8, sequence_length=4, choices=asked.choices
    ).problems()

    assert problem.costs.latency_s == 3e-3


def test_measured_costs_are_of_one_size_and_kind():
    costs = measured_costs(costs_of()(2, "full"), 2, "full")

    assert costs(2, "full").num_layers == 8
    with pytest.raises(ConfigError, match="microbatches of 2 and checkpointing 'full', not 1 and 'full'"):
        costs(1, "full")
