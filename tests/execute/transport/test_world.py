"""A pipeline runs alone unless torch.distributed has a group."""

import pytest
import torch
import torch.distributed as dist

from penstock.execute.transport import LocalTransport, TorchTransport, world
from penstock.execute.transport.world import carries, default_device, default_transport, shares_process
from tests.support.ranks import run_ranks


def test_without_torch_distributed_one_process_is_the_whole_world():
    transport = default_transport(None, 7.0)

    assert isinstance(transport, LocalTransport)
    assert (transport.rank, transport.num_ranks, transport.deadline_s) == (0, 1, 7.0)
    assert default_device(None) == torch.device("cpu")


def test_only_nccl_for_cuda_puts_stages_on_a_gpu():
    both = ["cuda:nccl", "cpu:gloo,cuda:nccl", "CPU:gloo, CUDA:nccl"]
    neither = ["cpu:gloo", "gloo", "undefined", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:ncclx", "", "cuda:gloo,xpu:nccl"]

    assert [carries(backends, "cuda") for backends in both] == [True] * len(both)
    assert [carries(backends, "cuda") for backends in neither] == [False] * len(neither)
    assert carries("cpu:gloo,xpu:xccl", "xpu")
    assert not carries("cpu:gloo,mps:gloo", "mps")


@pytest.mark.parametrize(("asked", "made"), [("cpu", "cpu"), (None, "cuda:3")])
def test_messages_go_between_devices_of_the_kind_that_is_asked_for(monkeypatch, asked, made):
    """In a group that has NCCL, stages may be on CPUs all the same."""
    monkeypatch.setattr(world, "default_device", lambda group: torch.device("cuda:3"))
    monkeypatch.setattr(world, "TorchTransport", lambda group, **options: options)

    assert str(world.group_transport(None, 7.0, device=asked)["device"]) == made


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", None], ids=["both", "none named"])
def test_without_nccl_stages_stay_on_the_cpu_whatever_the_groups_backend_is_called(backend):
    if backend is None and torch.cuda.is_available():
        pytest.skip("with a GPU this is NCCL's case")
    assert run_ranks(1, own_device, backend=backend) == ["cpu"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", None], ids=["nccl", "both", "none named"])
def test_with_nccl_stages_are_on_the_gpu_whatever_the_groups_backend_is_called(backend):
    assert run_ranks(1, own_device, backend=backend) == ["cuda:0"]


def own_device(rank):
    return str(default_device(None))


def test_ranks_share_a_process_only_as_threads_of_it():
    assert [shares_process(transport) for transport in LocalTransport.create(2, 1.0)] == [True, True]
    assert not shares_process(LocalTransport.create(1, 1.0)[0])


@pytest.mark.slow
def test_within_torch_distributed_the_group_is_the_world():
    assert run_ranks(2, describe_worlds) == [[(0, 2, 5.0, "cpu"), (0, 1, 5.0, "cpu")], [(1, 2, 5.0, "cpu")]]


def describe_worlds(rank):
    alone = dist.new_group([0])
    found = []
    for group in [None, alone] if rank == 0 else [None]:
        transport = default_transport(group, 5.0)
        assert isinstance(transport, TorchTransport)
        assert not shares_process(transport)
        found.append((transport.rank, transport.num_ranks, transport.deadline_s, str(default_device(group))))
        transport.close()
    return found
