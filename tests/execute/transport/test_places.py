"""A rank knows where it is on the mesh, and what it does to its messages reaches both dimensions."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from penstock.errors import PeerLost
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.places import Places
from penstock.execute.transport.rank_names import RankNames
from tests.execute.transport.test_device_queue import Notes
from tests.support.local_pipelines import error_of

NUMBERS = [0, 1, 4, 5]


def places_of_all():
    """Two replicas of two ranks."""
    names = RankNames.on_mesh(NUMBERS, [{"pipeline": p, "data": d} for d in range(2) for p in range(2)])
    pipelines = [LocalTransport.create(2, names=names.select(indices)) for indices in ([0, 1], [2, 3])]
    data = [LocalTransport.create(2, names=names.select(indices)) for indices in ([0, 2], [1, 3])]
    return [Places(pipelines[d][p], data[p][d], names) for d in range(2) for p in range(2)]


def test_a_pipeline_alone_is_one_replica_whose_ranks_are_numbered_as_its_transport_does():
    own = Places.of(LocalTransport.create(3)[1])

    assert (own.replica, own.num_replicas, own.index, own.name) == (0, 1, 1, "rank 1")
    assert own.names_of_replica is own.names
    assert own.within_replica(str)(2) == "2"


def test_a_rank_of_a_mesh_is_counted_replica_by_replica():
    ranks = places_of_all()

    assert [rank.index for rank in ranks] == [0, 1, 2, 3]
    assert [rank.replica for rank in ranks] == [0, 0, 1, 1]
    assert [rank.name for rank in ranks][3] == "rank 5 (pipeline 1, data 1)"
    assert list(ranks[2].names_of_replica.numbers) == [4, 5]
    assert list(ranks[2].across) == [0, 2]
    assert ranks[2].within_replica(str)(1) == "5"


def test_waits_along_both_dimensions_are_told_by_number():
    ranks, notes = places_of_all(), Notes()
    notes.failed_peer = 4
    ranks[3].watch(notes)

    for own, peer, index in ((ranks[3].pipeline, ranks[2].pipeline, 0), (ranks[3].data, ranks[1].data, 0)):
        peer.post_send(own.rank, torch.zeros(1))
        own.wait(own.post_receive(index, torch.zeros(1)))

    assert notes.found == [4, "runs", 1, "runs"]


def test_an_abort_reaches_the_peers_of_both_dimensions_and_a_recovery_needs_all():
    ranks = places_of_all()
    ranks[0].abort()

    for peer in (ranks[1].pipeline, ranks[2].data):
        with pytest.raises(PeerLost):
            peer.post_send(0, torch.zeros(1))
    assert ranks[3].pipeline.post_send(0, torch.zeros(1))
    ranks[0].pipeline.deadline_s = 0.05
    assert "[1] did not come" in str(error_of(ranks[0].recover))


def test_closing_closes_every_dimension_also_where_one_cannot_be():
    ranks = places_of_all()
    broken = Places(Mock(close=Mock(side_effect=OSError("planted"))), ranks[0].data, ranks[0].names)

    assert "planted" in str(error_of(broken.close))
    with pytest.raises(PeerLost, match="has closed"):
        ranks[2].data.post_send(0, torch.zeros(1))


def test_both_dimensions_are_aborted_at_once_as_each_waits_for_what_the_other_has_on_the_device():
    aborts = threading.Barrier(2)
    transport = SimpleNamespace(deadline_s=5.0, abort=lambda: aborts.wait(5.0))

    Places(transport, transport, RankNames.plain(4)).abort()

    assert not aborts.broken
    assert aborts.n_waiting == 0
