"""Wires are measured channel by channel: how long a message takes, and how many bytes a second it carries."""

import pytest
import torch

from penstock.execute.transport import TorchTransport
from penstock.execute.transport.protocol import Tag
from penstock.placement import Placement
from penstock.train.measuring.channels import NUM_TRIPS, SMALL_BYTES, channels_of, measure_channels
from tests.local_pipelines import on_ranks
from tests.local_wires import slow
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LARGE_BYTES = 1 << 20
WIRE_S = 0.02


def test_channels_are_the_ways_of_outputs_and_gradients_between_ranks():
    assert channels_of(Placement.line(3)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert channels_of(Placement.vee(2)) == [(0, 1), (1, 0)]
    assert channels_of(Placement.loop(3, 6)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert channels_of(Placement.line(1)) == []


@pytest.mark.slow
@pytest.mark.alone
def test_bandwidth_is_what_a_large_message_takes_longer_than_a_small_one():
    def case(wires):
        return measure_channels(wires, [(0, 1)], LARGE_BYTES, CPU)

    slow_for_large = slow(lambda *ends, num_bytes: WIRE_S if num_bytes > SMALL_BYTES else 0.0)
    [speed], [same] = on_ranks(2, case, connect=slow_for_large)

    assert speed == same
    assert (speed.sender, speed.receiver) == (0, 1)
    assert speed.bandwidth_bytes_per_s == pytest.approx(LARGE_BYTES / WIRE_S, rel=0.3)
    assert speed.latency_s < WIRE_S / 4


def test_every_channel_is_measured_once_and_known_to_all_ranks():
    channels = [(0, 1), (1, 0), (2, 0)]
    num_sent = []

    def case(wires):
        post_send = wires.post_send

        def counted(peer, tensor, tag=Tag.DATA):
            num_sent.extend([(wires.rank, peer)] if tag is Tag.DATA else [])
            return post_send(peer, tensor, tag)

        wires.post_send = counted
        return measure_channels(wires, channels, LARGE_BYTES, CPU)

    found = on_ranks(3, case)

    assert found[0] == found[1] == found[2]
    assert [(speed.sender, speed.receiver) for speed in found[0]] == channels
    assert all(speed.latency_s > 0 for speed in found[0])
    assert num_sent.count((2, 0)) == 2 * NUM_TRIPS


def measure_over_gloo(rank):
    wires = TorchTransport(deadline_s=20.0)
    try:
        return measure_channels(wires, [(0, 1), (1, 0)], LARGE_BYTES, CPU)
    finally:
        wires.close()


@pytest.mark.slow
def test_gloo_is_measured_between_processes():
    found, same = run_ranks(2, measure_over_gloo)

    assert found == same
    assert all(0 < speed.latency_s < 1.0 for speed in found)
    assert all(speed.bandwidth_bytes_per_s > 1e6 for speed in found)
