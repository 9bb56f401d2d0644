"""Processes as ranks: torch.distributed's own calls go by the emulated NCCL, and on the CPU by gloo."""

import pytest
import torch
import torch.distributed as dist

from tests.emulated.rank_processes import device_of, processes, reports

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def pool(emulated_is_there):
    with processes(2) as ranks:
        yield ranks


def _collect(rank):
    device, group = device_of(rank), dist.group.WORLD
    own, gathered, scattered = (torch.full((n,), rank + 1.0, device=device) for n in (2, 4, 2))
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=device))
    work = dist.all_reduce(own, async_op=True)
    work.wait()
    on_host = torch.ones(1)
    dist.all_reduce(on_host)
    dist.barrier()
    backend = group._get_backend(device).name()
    return backend, [tensor.cpu().tolist() for tensor in (gathered, scattered, own, on_host)], reports()


def test_collectives_of_torch_distributed(pool):
    for rank, (backend, found, reported) in enumerate(pool.run(_collect)):
        assert backend == "emunccl"
        assert found == [[1, 1, 2, 2], [4.0 * rank, 4.0 * rank + 2], [3, 3], [2]]
        assert reported == []


def _exchange(rank):
    device, peer = device_of(rank), 1 - rank
    sent, received = torch.full((2,), float(rank), device=device), torch.empty(2, device=device)
    operations = [dist.P2POp(dist.isend, sent * 2, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    single = torch.full((2,), 7.0, device=device)
    work = dist.isend(single, 1) if rank == 0 else dist.irecv(received, 0)
    is_over = work.is_completed()
    work.wait()
    torch.accelerator.synchronize()
    return received.cpu().tolist(), work.is_completed() and not is_over, reports()


def test_single_messages_and_batches(pool):
    assert pool.run(_exchange) == [([2.0, 2.0], True, []), ([7.0, 7.0], True, [])]


def _read_too_early(rank):
    received = torch.empty(2, device=device_of(rank))
    work = dist.isend(torch.ones(2, device=device_of(rank)), 1) if rank == 0 else dist.irecv(received, 0)
    early = received * 2 if rank == 1 else None
    work.wait()
    torch.accelerator.synchronize()
    del early
    return reports()


def test_a_report_of_one_rank_names_its_lines(pool):
    nothing, (report,) = pool.run(_read_too_early)

    assert nothing == []
    assert "recv from 0" in report
    assert "test_processes.py" in report


def test_the_device_has_its_backend_by_default(pool):
    assert pool.run(_default_backend) == ["emunccl"] * 2


def _default_backend(rank):
    return dist.get_default_backend_for_device(device_of(rank))
