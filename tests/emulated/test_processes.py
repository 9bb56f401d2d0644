"""Processes as ranks: torch.distributed's own calls go by the emulated NCCL, and on the CPU by gloo."""

import pytest
import torch
import torch.distributed as dist

from tests.emulated.rank_processes import device_of, processes, reports

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def _collect_and_exchange(rank):
    device, peer, group = device_of(rank), 1 - rank, dist.group.WORLD
    own, gathered, scattered = (torch.full((n,), rank + 1.0, device=device) for n in (2, 4, 2))
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=device))
    dist.all_reduce(own, async_op=True).wait()
    on_host, received = torch.ones(1), torch.empty(2, device=device)
    dist.all_reduce(on_host)
    dist.barrier()
    operations = [dist.P2POp(dist.isend, own * (rank + 1), peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    work = dist.isend(scattered, 1) if rank == 0 else dist.irecv(scattered, 0)
    is_over = work.is_completed()
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed() > is_over
    names = [group._get_backend(device).name(), dist.get_default_backend_for_device(device)]
    return names, [tensor.cpu().tolist() for tensor in (gathered, own, on_host, received, scattered)], reports()


def _read_too_early(rank):
    received = torch.empty(2, device=device_of(rank))
    work = dist.isend(torch.ones(2, device=device_of(rank)), 1) if rank == 0 else dist.irecv(received, 0)
    early = received * 2 if rank == 1 else None
    work.wait()
    torch.accelerator.synchronize()
    del early
    return reports()


def test_torch_distributed_goes_by_the_emulated_nccl_and_a_report_of_one_rank_names_its_lines(emulated_is_there):
    with processes(2) as pool:
        calls, (nothing, (report,)) = pool.run(_collect_and_exchange), pool.run(_read_too_early)

    for rank, (names, values, reported) in enumerate(calls):
        assert names == ["emunccl"] * 2
        assert values == [[1, 1, 2, 2], [3, 3], [2], [3.0 * (2 - rank)] * 2, [0.0, 2.0]]
        assert reported == nothing == []
    assert "recv from 0" in report
    assert "test_processes.py" in report
