"""Replicas on the command line: what is asked for, and what does not belong together."""

from argparse import Namespace

import pytest

from penstock.cli.sharding import KEYS, costs_of_replicas, replicas_of, sharding_of
from penstock.errors import ConfigError
from penstock.lowering import NOT_SHARDED, Sharding
from penstock.simulation import Costs


def given(**options):
    return Namespace(**dict.fromkeys(KEYS) | options)


def test_nothing_is_sharded_and_no_replicas_are_asked_for_unless_given():
    assert sharding_of(given()) == NOT_SHARDED
    assert replicas_of(given(), 4) is None
    costs = Costs.uniform(reduce_s=(1.0,))
    assert costs_of_replicas(given(), costs) is costs


def test_options_are_those_of_lower_and_a_residency_of_0_is_all():
    assert sharding_of(given(shard="full")) == Sharding("full", 2, 1)
    assert sharding_of(given(shard="full", residency=3, look_ahead=0)) == Sharding("full", 3, 0)
    assert sharding_of(given(shard="full", residency=0)) == Sharding("full", None, 1)
    assert sharding_of(given(shard="optimizer", look_ahead=2)) == Sharding("optimizer", 2, 2)


def test_a_way_to_shard_alone_means_the_replicas_of_the_costs():
    assert replicas_of(given(shard="full"), 4) == 4
    assert replicas_of(given(shard="full", data=8), 4) == 8
    costs = Costs.uniform(parameter_bytes=(400,), replica_bandwidth_bytes_per_s=100.0, replicas=2)
    assert costs_of_replicas(given(shard="full"), costs).unshard_s == (2.0,)
    assert costs_of_replicas(given(data=4), costs).shards == 1
    assert costs_of_replicas(given(data=4, shard="optimizer"), costs).shards == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"residency": 2}, "--residency: only for --shard full"),
        ({"residency": 2, "shard": "optimizer"}, "--residency: only for --shard full"),
        ({"look_ahead": 2}, "--look-ahead: only for --shard full or optimizer"),
        ({"residency": -1, "shard": "full"}, "--residency: -1; give a number of 1 or more, or 0 for all"),
        ({"look_ahead": -1, "shard": "full"}, "--look-ahead: -1; give a number"),
        ({"shard": "ful"}, "--shard: 'ful' .*expected one of none, optimizer, full.*Did you mean 'full'"),
    ],
)
def test_what_does_not_belong_together_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        sharding_of(given(**options))


@pytest.mark.parametrize("data", [0, -2])
def test_there_is_a_replica_or_more(data):
    with pytest.raises(ConfigError, match=rf"--data: {data}.*1 or more"):
        replicas_of(given(data=data), 1)
