"""Each use of torch.distributed that its documentation does not promise; a failure names what has changed."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from operator import attrgetter
from threading import Event

import pytest
import torch
import torch.distributed as dist

from penstock.execute import undocumented_backends

SHORT_S = 0.2
LONG_S = 20.0


def test_a_group_gives_its_store(world):
    world.set("greeting", "hello")

    undocumented_backends.store_of(dist.group.WORLD).set("answer", "hello too")

    assert b"hello" in undocumented_backends.store_of(dist.group.WORLD).get("answer")


def with_two_backends(case):
    """Run a case on both ends of a connection."""
    store = dist.HashStore()

    def run(rank):
        backend = undocumented_backends.gloo(store, rank, 2, LONG_S)
        return case(backend, rank)

    with ThreadPoolExecutor(2) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(2)]]


def test_a_backend_of_gloo_works_without_a_group_and_matches_messages_by_tag():
    def case(backend, rank):
        tensors = [torch.full((3,), float(tag if rank == 0 else -1)) for tag in (0, 1)]
        if rank == 0:
            works = [backend.send([tensors[tag]], 1, tag) for tag in (1, 0)]
        else:
            works = [backend.recv([tensors[tag]], 0, tag) for tag in (0, 1)]
        for work in works:
            work.wait(timedelta(seconds=LONG_S))
        backend.shutdown()
        return [tensor.tolist() for tensor in tensors]

    assert with_two_backends(case) == [[[0.0] * 3, [1.0] * 3]] * 2


def test_a_wait_that_takes_too_long_says_so():
    is_over = Event()

    def case(backend, rank):
        if rank == 1:
            is_over.wait(LONG_S)
            return None
        with pytest.raises(RuntimeError) as caught:
            backend.recv([torch.zeros(3)], 1, 0).wait(timedelta(seconds=SHORT_S))
        is_over.set()
        backend.abort()
        return caught.value

    error, _ = with_two_backends(case)

    assert undocumented_backends.is_timeout(error)
    assert not undocumented_backends.is_timeout(RuntimeError("Connection closed by peer"))


def register(monkeypatch, make, **options):
    """Register a backend for devices of kind hpu until the test is over."""
    others = {kind: name for kind, name in dist.Backend.default_device_backend_map.items() if kind != "hpu"}
    monkeypatch.setattr(dist.Backend, "_plugins", dict(dist.Backend._plugins))
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", others)
    dist.Backend.register_backend("made_up", make, devices=["hpu"], **options)


@pytest.mark.parametrize("takes_options", [False, True])
def test_a_backend_that_was_registered_for_a_kind_of_device_is_made_by_its_own_function(monkeypatch, takes_options):
    def make(store, rank, num_ranks, timeout):
        return rank, num_ranks, timeout, None

    def make_with_options(options, of_backend):
        return options.group_rank, options.group_size, options.timeout, of_backend

    register(monkeypatch, make_with_options if takes_options else make, extended_api=takes_options)
    store, limit = dist.HashStore(), timedelta(seconds=3)

    found = undocumented_backends.device_backend(torch.device("hpu"), store, 1, 2, limit)

    assert found == (1, 2, limit, None)
    with pytest.raises(RuntimeError, match="this torch cannot carry messages between devices of kind 'mps' by gloo"):
        undocumented_backends.device_backend(torch.device("mps"), store, 1, 2, limit)


class Nccl:
    """Notes what the environment says when it is made."""

    class Options:
        pass

    def __init__(self, store, rank, num_ranks, options):
        self.is_watched = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"

    def set_timeout(self, limit):
        pass


@pytest.mark.parametrize("before", [None, "0"])
def test_a_backend_of_nccl_has_no_watchdog_and_others_keep_theirs(monkeypatch, before):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)

    backend = undocumented_backends.device_backend(torch.device("cuda"), dist.HashStore(), 0, 2, timedelta(1))

    assert not backend.is_watched
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before


def test_a_work_lets_the_stream_wait_or_the_host_and_may_have_a_result_and_nccl_needs_no_group():
    assert all(callable(getattr(dist.Work, name)) for name in ("is_completed", "block_current_stream", "wait"))
    if dist.is_nccl_available():
        names = ("Options", "set_timeout", "send", "recv", "abort", "shutdown", "_group_end")
        assert all(callable(getattr(dist.ProcessGroupNCCL, name)) for name in names)
    with pytest.raises(RuntimeError, match="getFutureResult not implemented"):
        dist.Work().get_future_result()


def test_a_backend_gathers_parts_and_sums_without_a_process_group_around_it():
    def case(backend, rank):
        whole, part = torch.empty(4), torch.tensor([1.0, 2.0]) + rank
        total = part.clone()
        undocumented_backends.sum_in_place(backend, total).wait()
        assert total.tolist() == [3.0, 5.0]
        undocumented_backends.gather_into(backend, whole, part).wait()
        own = torch.empty(2)
        undocumented_backends.sum_into(backend, own, whole * (rank + 1)).wait()
        backend.shutdown()
        return whole.tolist(), own.tolist()

    assert with_two_backends(case) == [([1.0, 2.0, 2.0, 3.0], [3.0, 6.0]), ([1.0, 2.0, 2.0, 3.0], [6.0, 9.0])]


def test_a_backend_has_the_calls_that_begin_and_end_a_group():
    backend = attrgetter("_distributed_c10d.Backend")(torch._C)

    assert callable(undocumented_backends._BEGIN_GROUP(backend))
    assert callable(undocumented_backends._END_GROUP(backend))
