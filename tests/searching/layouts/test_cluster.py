"""Nodes, devices, and the links between ranks."""

import pytest

from penstock.errors import ConfigError
from penstock.searching.layouts.cluster import Cluster, Wire

FAST, SLOW = Wire(latency_s=1e-6, bandwidth_bytes_per_s=400e9), Wire(latency_s=1e-5, bandwidth_bytes_per_s=50e9)


def cluster(gpus, nodes, **fields):
    return Cluster(gpus=gpus, nodes=nodes, memory_bytes=1 << 30, within=FAST, between=SLOW, **fields)


def test_replicas_of_a_stage_are_neighbors_and_exchange_within_a_node_that_holds_them():
    assert cluster(8, 2).replica_wire(pipeline=2, data=4) is FAST
    assert cluster(8, 2).replica_wire(pipeline=1, data=8) is SLOW
    assert cluster(8, 1).replica_wire(pipeline=1, data=8) is FAST
    assert cluster(6, 2).replica_wire(pipeline=3, data=2) is SLOW  # rank 1 has devices 2 and 3


def test_messages_between_nodes_take_the_slow_link():
    pairs = {(channel.sender, channel.receiver) for channel in cluster(8, 2).channels(pipeline=4, data=2)}

    assert not {(0, 1), (2, 3)} & pairs
    assert {(1, 2), (2, 1), (0, 3)} <= pairs
    assert {channel.bandwidth_bytes_per_s for channel in cluster(8, 2).channels(4, 2)} == {50e9}
    assert cluster(8, 1).channels(pipeline=8, data=1) == ()


def test_what_is_no_tensor_is_taken_from_the_memory():
    assert cluster(8, 1, reserve_bytes=1 << 20).limit_bytes == (1 << 30) - (1 << 20)


@pytest.mark.parametrize(
    ("gpus", "nodes", "message"),
    [
        (8, 3, "8 GPUs do not divide by 3 nodes; use 2 or 4 nodes, or 6 or 9 GPUs"),
        (0, 1, "gpus: 0; expected a number from 1 to 131,072"),
        (4, 5, "nodes: 5; expected a number from 1 to 4"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_the_nearest_that_do(gpus, nodes, message):
    with pytest.raises(ConfigError, match=message):
        cluster(gpus, nodes)
