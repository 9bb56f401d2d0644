"""Clusters of devices by name."""

import pytest

from penstock.errors import ConfigError
from penstock.run_planning.clusters import LINKS, RESERVE_BYTES, cluster_of, link_within
from penstock.simulation.costs.devices import tables


def test_every_device_has_its_links():
    assert LINKS.keys() == tables()["device"].keys()
    for device in LINKS:
        cluster = cluster_of(8, 2, device, None)
        assert cluster.within.bandwidth_bytes_per_s == link_within(device).reached_bytes_per_s
        assert cluster.between.latency_s >= cluster.within.latency_s


def test_what_is_no_tensor_is_reserved_on_devices_and_not_where_there_is_none():
    assert cluster_of(8, 1, "h100-sxm", 1 << 36).limit_bytes == (1 << 36) - RESERVE_BYTES
    assert cluster_of(8, 1, None, 1 << 30).limit_bytes == 1 << 30
    assert cluster_of(8, 1, None, 1 << 30).within is None


def test_neither_a_device_nor_a_memory_is_refused():
    with pytest.raises(ConfigError, match="name the device, as h100-sxm"):
        cluster_of(8, 1, None, None)
