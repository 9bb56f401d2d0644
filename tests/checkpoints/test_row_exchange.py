"""Rows of tensors on their way to the replica that writes them."""

import pytest
import torch

from penstock.checkpoints import row_exchange
from penstock.checkpoints.local_tensors import LocalTensor
from penstock.checkpoints.row_exchange import exchange_rows
from penstock.errors import PeerLost
from penstock.execute.replicas.rows import Rows
from penstock.execute.transport import LocalTransport
from tests.support.local_pipelines import error_of, on_ranks

SHAPES = [(5, 3), (1, 4), (0, 2), (8,), (7, 2, 2), (2,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float16]
CPU = torch.device("cpu")


def wholes():
    numbers = enumerate(zip(SHAPES, DTYPES, strict=True))
    return [
        (torch.arange(torch.Size(shape).numel()) + seed).reshape(shape).to(dtype) for seed, (shape, dtype) in numbers
    ]


def held(whole, transport):
    rows = Rows(whole.shape, (), transport.num_ranks).of_replica(transport.rank)
    return LocalTensor(whole[rows.start : rows.stop].clone(), tuple(whole.shape), rows)


def exchanged(transport, owners):
    """Exchange with the owner of each tensor; return those of this replica, and what it was to get."""
    everything = [(owner, whole, held(whole, transport)) for owner, whole in zip(owners, wholes(), strict=True)]
    wanted = [[each for owner, _, each in everything if owner == replica] for replica in range(transport.num_ranks)]
    own = []
    for each in wanted[transport.rank]:
        own.append(torch.zeros(each.shape, dtype=each.local.dtype))
        each.place_in(own[-1]).copy_(each.local)
    exchange_rows(transport, wanted, own, CPU)
    return own, [whole for owner, whole, _ in everything if owner == transport.rank]


@pytest.mark.parametrize(
    ("num_replicas", "num_writers", "piece_bytes"),
    [(1, 1, 2**24), (2, 2, 7), (3, 3, 1), (3, 3, 2**24), (4, 4, 64), (3, 1, 2**24)],
)
def test_every_replica_gets_all_rows_of_what_it_writes(num_replicas, num_writers, piece_bytes, monkeypatch):
    monkeypatch.setattr(row_exchange, "PIECE_BYTES", piece_bytes)
    owners = [number % num_writers for number in range(len(SHAPES))]

    for own, expected in on_ranks(num_replicas, exchanged, owners):
        assert len(own) == len(expected)
        assert all(map(torch.equal, own, expected))


class Counting(LocalTransport):
    """Remembers the bytes of its messages, and how many are under way."""

    def _opened(self, ticket, posted):
        self.__dict__.setdefault("sizes", []).append(posted.message.tensor.nbytes)
        self.__dict__["most"] = max(self.__dict__.get("most", 0), self._under_way(posted.message.tensor.nbytes))
        return super()._opened(ticket, posted)

    def _under_way(self, more):
        return more + sum(posted.message.tensor.nbytes for posted in self._open.values())


def test_messages_and_what_is_under_way_are_bounded(monkeypatch):
    monkeypatch.setattr(row_exchange, "PIECE_BYTES", 400)
    whole = torch.arange(3000).view(1000, 3)

    def case(transport):
        transport.__class__ = Counting
        own = [torch.zeros_like(whole)]
        each = held(whole, transport)
        each.place_in(own[0]).copy_(each.local)
        exchange_rows(transport, [[each]] * 4, own, CPU)
        return torch.equal(own[0], whole), max(transport.sizes), transport.most

    assert on_ranks(4, case) == [(True, 100, 600)] * 4  # 3 messages of 100 bytes each way


def test_a_replica_that_is_lost_ends_the_exchange_at_once():
    def case(transport):
        if transport.rank == 1:
            return transport.abort()
        return error_of(exchanged, transport, [0] * len(SHAPES))

    assert isinstance(on_ranks(2, case)[0], PeerLost)
