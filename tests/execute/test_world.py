"""A pipeline runs alone unless torch.distributed has a group."""

import pytest
import torch
import torch.distributed as dist

from penstock.execute.transport import LocalTransport, TorchTransport
from penstock.execute.world import default_device, default_transport, shares_process
from tests.ranks import run_ranks


def test_without_torch_distributed_one_process_is_the_whole_world():
    transport = default_transport(None, 7.0)

    assert isinstance(transport, LocalTransport)
    assert (transport.rank, transport.num_ranks, transport.deadline_s) == (0, 1, 7.0)
    assert default_device(None) == torch.device("cpu")


def test_ranks_share_a_process_only_as_threads_of_it():
    assert [shares_process(transport) for transport in LocalTransport.create(2, 1.0)] == [True, True]
    assert not shares_process(LocalTransport.create(1, 1.0)[0])


@pytest.mark.slow
def test_within_torch_distributed_the_group_is_the_world():
    assert run_ranks(2, describe_worlds) == [
        [("TorchTransport", 0, 2, 5.0, "cpu"), ("TorchTransport", 0, 1, 5.0, "cpu")],
        [("TorchTransport", 1, 2, 5.0, "cpu")],
    ]


def describe_worlds(rank):
    alone = dist.new_group([0])
    groups = [None, alone] if rank == 0 else [None]
    found = []
    for group in groups:
        transport = default_transport(group, 5.0)
        assert isinstance(transport, TorchTransport)
        assert not shares_process(transport)
        found.append(
            (
                type(transport).__name__,
                transport.rank,
                transport.num_ranks,
                transport.deadline_s,
                str(default_device(group)),
            )
        )
        transport.close()
    return found
