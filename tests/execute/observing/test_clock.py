"""Clocks of different hosts are brought to one scale, as exactly as the pings say."""

import time
from itertools import count

import numpy as np
import pytest
import torch

from penstock.execute.observing.clock import Alignment, Clock, ClockComparison, Offset
from tests.support.local_pipelines import on_ranks
from tests.support.rank_clocks import RankClocks, clocked

CPU = torch.device("cpu")
SPEEDS = (1.0, 1.001, 0.998)
"""Drift of a part in a thousand is far more than clocks have; here a step must show it within milliseconds."""
AHEAD_S = (0.0, 5000.0, -70.0)
SHORT_S = 0.02


def false_clock(rank, host=None, *, begin_s=0.0):
    """A clock that is ahead, and goes faster or slower, than the true one from `begin_s` on."""
    return Clock(
        lambda: AHEAD_S[rank] + begin_s + SPEEDS[rank] * (time.monotonic() - begin_s),
        f"host {rank}" if host is None else host,
    )


def compare(wires, hosts, begin_s):
    """Return the alignment, and moments between its two ends on the own clock."""
    clock = false_clock(wires.rank, hosts[wires.rank], begin_s=begin_s)
    comparison = ClockComparison(wires, CPU, clock, hosts)
    comparison.begin()
    moments = [clock.read()]
    while moments[-1] < moments[0] + SHORT_S:
        moments.append(clock.read())
    return comparison.end(), np.array(moments)


def test_offset_and_drift_of_faked_clocks_are_found_within_the_stated_uncertainty():
    begin_s = time.monotonic()

    found = on_ranks(3, compare, ("a", "b", "c"), begin_s)

    alignment = found[0][0]
    assert all(other == alignment for other, _ in found)
    for rank, (_, moments) in enumerate(found):
        true_s = (moments - AHEAD_S[rank] - begin_s) / SPEEDS[rank] + begin_s
        own = max(alignment.first[rank].uncertainty_s, alignment.last[rank].uncertainty_s)
        assert np.abs(alignment.to_common(rank, moments) - true_s).max() <= own + 1e-6
        assert own <= alignment.uncertainty_s
    assert 0 < alignment.uncertainty_s < SHORT_S
    assert [round(offset.ahead_s) for offset in alignment.first] == [0, 5000, -70]


@pytest.mark.parametrize("hosts", ["abb", "aaa"])
def test_ranks_of_one_host_share_an_offset_and_only_one_of_another_host_is_pinged(hosts):
    def case(wires):
        sent = []
        post_send = wires.post_send
        wires.post_send = lambda peer, tensor, *tag: (tag or sent.append(peer), post_send(peer, tensor, *tag))[1]
        comparison = ClockComparison(wires, CPU, Clock(time.monotonic, hosts[wires.rank]), hosts)
        comparison.begin()
        return comparison.end(), sent

    found = on_ranks(3, case)

    alignment = found[0][0]
    assert alignment.first[1] == alignment.first[2]
    assert {peer for _, sent in found for peer in sent} == ({0, 1} if hosts == "abb" else set())
    assert found[2][1] == []
    if hosts == "aaa":
        assert alignment.uncertainty_s == 0.0
        assert alignment.to_common(1, np.array([3.5])).tolist() == [3.5]


def test_of_several_pings_the_shortest_counts():
    """Answers that take long on one way give an offset that is off by as much; some are let through at once."""
    clocks, num_answers = RankClocks(), count(1)

    def case(wires):
        if wires.rank == 1:
            post_send = wires.post_send

            def sometimes_late(peer, tensor, *tag):
                if next(num_answers) % 4:
                    clocks.sleep(0.005)
                return post_send(peer, tensor, *tag)

            wires.post_send = sometimes_late
        clock = Clock(lambda: AHEAD_S[wires.rank] + clocks.monotonic(), f"host {wires.rank}")
        comparison = ClockComparison(wires, CPU, clock, ("a", "b"))
        comparison.begin()
        return comparison.end()

    alignment, _ = on_ranks(2, case, connect=clocked(clocks))

    for offsets in (alignment.first, alignment.last):
        assert (offsets[1].ahead_s, offsets[1].uncertainty_s) == pytest.approx((AHEAD_S[1], 0.0), abs=1e-6)


def test_the_uncertainty_between_two_ranks_is_that_of_the_two_worst_hosts_and_an_offset_is_interpolated():
    sure, known, vague = (Offset(0.0, ahead_s, uncertainty_s) for ahead_s, uncertainty_s in ((0, 0), (1, 2), (2, 5)))

    assert Alignment((sure, known, vague), (sure, known, vague)).uncertainty_s == 7
    assert Alignment((sure, vague, vague), (sure, vague, vague)).uncertainty_s == 5
    assert Alignment((sure, sure), (sure, sure)).uncertainty_s == 0
    moving = Alignment((Offset(10.0, 1.0, 0.0),), (Offset(20.0, 2.0, 0.0),))
    assert moving.to_common(0, np.array([10.0, 15.0, 20.0])).tolist() == [9.0, 13.5, 18.0]
