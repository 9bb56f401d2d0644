"""Tensors of any type and layout come from the first replica as they are there."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from penstock.execute.replicas import first_replica
from penstock.execute.replicas.first_replica import SavedBuffers, share_all
from tests.support.local_pipelines import on_ranks, values


def tensors_of(rank):
    return [
        values(rank, 3, 5),
        torch.tensor(rank),
        values(rank, 2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([rank > 0, True]),
        values(rank, 3).to(torch.bfloat16),
        values(rank, 4, 2).to(torch.complex64),
        values(rank, 6, 4).t(),
        torch.empty(0),
        nn.Parameter(values(rank, 3, dtype=torch.float64)),
    ]


@pytest.mark.parametrize("piece_bytes", [None, 64], ids=["in one message", "piece by piece"])
def test_all_kinds_of_tensors_arrive_as_they_are(monkeypatch, piece_bytes):
    sizes = []
    if piece_bytes is not None:
        monkeypatch.setattr(first_replica, "PIECE_BYTES", piece_bytes)

    def case(transport):
        found, post = tensors_of(transport.rank), transport.post_send
        transport.post_send = lambda peer, tensor: (sizes.append(tensor.nbytes), post(peer, tensor))[1]
        share_all(transport, [torch.empty(0)])  # nothing is sent where there is nothing
        share_all(transport, found)
        return found

    for found in on_ranks(3, case):
        for tensor, expected in zip(found, tensors_of(0), strict=True):
            assert torch.equal(tensor, expected)
            assert tensor.stride() == expected.stride()
    assert len(sizes) == 2 if piece_bytes is None else len(sizes) > 6


class LeavesOut(nn.Sequential):
    """Keeps a count out of its weights file."""

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


@pytest.mark.parametrize(
    ("wrap", "count"),
    [
        (nn.Sequential, [0]),
        (checkpoint_wrapper, [0]),
        (LeavesOut, []),
        (lambda inner: nn.Sequential(inner, inner), [0]),
        (lambda inner: nn.Sequential(inner, nn.LazyLinear(2)), [0]),
    ],
    ids=["plain", "renamed", "left out", "twice", "beside a parameter without a shape"],
)
def test_the_saved_buffers_are_those_that_modules_hold_now(wrap, count):
    inner, other = nn.BatchNorm1d(2), nn.Linear(2, 2)
    inner.register_buffer("table", torch.zeros(2), persistent=False)
    buffers = SavedBuffers([wrap(inner), other])
    inner.running_mean = torch.ones(2)

    assert [buffer.tolist() for buffer in buffers.now()] == [[1.0, 1.0], [1.0, 1.0], *count]
