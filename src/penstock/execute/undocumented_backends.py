"""Undocumented backends of torch.distributed, which carry messages without a process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import attrgetter
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_REGISTERED = attrgetter("_plugins")
"""Makers of backends that are not part of torch, by name: an attribute of `dist.Backend`."""
_BACKEND_OPTIONS = attrgetter("distributed_c10d._DistributedBackendOptions")(dist)
"""Options of a backend that was registered with `extended_api`."""
_BEGIN_GROUP, _END_GROUP = attrgetter("_start_coalescing"), attrgetter("_end_coalescing")
_GATHER, _SCATTERED_SUM = attrgetter("_allgather_base"), attrgetter("_reduce_scatter_base")
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""A backend of NCCL reads it when it is made."""


class Backend(Protocol):
    """The methods of a backend that are used without the process group around it."""

    def send(self, tensors: list[Tensor], destination: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor], /) -> dist.Work: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


def sum_in_place(backend: Backend, tensor: Tensor) -> dist.Work:
    """Sum a tensor over all ranks."""
    return backend.allreduce([tensor])


def gather_into(backend: Backend, gathered: Tensor, part: Tensor) -> dist.Work:
    """Gather the parts of all ranks, one behind the other."""
    return cast(dist.Work, _GATHER(backend)(gathered, part))


def sum_into(backend: Backend, part: Tensor, summands: Tensor) -> dist.Work:
    """Sum a tensor over all ranks, of which each gets its part."""
    return cast(dist.Work, _SCATTERED_SUM(backend)(part, summands))


def begin_coalescing(backend: Backend) -> None:
    """Have the backend keep what is posted from now on, until `end_coalescing` launches all of it as one."""
    _BEGIN_GROUP(backend)()


def end_coalescing(backend: Backend) -> dist.Work:
    """Launch what was posted since `begin_coalescing`; the work ends as a whole."""
    return cast(dist.Work, _END_GROUP(backend)())


def end_group(backend: Backend) -> None:
    """End what a call of NCCL's that has raised leaves open on this thread, where it would keep all later ones waiting.

    NCCL (2.28) runs calls within a group at the group's end, and a `send` to a peer that has aborted ends none: to the
    host, later messages of this thread are over at once, also those of new backends, and none is ever sent.
    """
    end = getattr(backend, "_group_end", None)
    if end is not None:
        with suppress(RuntimeError):  # the call's error, which it has raised already, or that no group is open
            end()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store in which the ranks of a group have met."""
    return group.get_group_store()


def gloo(store: dist.Store, rank: int, num_ranks: int, deadline_s: float) -> Backend:
    """Connect the ranks that call this with one store by gloo."""
    return cast(Backend, dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=deadline_s)))


def device_backend(device: torch.device, store: dist.Store, rank: int, num_ranks: int, limit: timedelta) -> Backend:
    """Connect the ranks that call this with one store by the backend of their devices.

    With NCCL's, `Work.wait` blocks the host, at most for `limit`. An abort waits until all that NCCL runs on the device
    has ended, that of other backends too: abort all at once.

    Raises:
        RuntimeError: this torch has no such backend.
    """
    name = dist.get_default_backend_for_device(device)
    if name == dist.Backend.NCCL and dist.is_nccl_available():
        with _without_watchdog():
            backend = dist.ProcessGroupNCCL(store, rank, num_ranks, dist.ProcessGroupNCCL.Options())
        backend.set_timeout(limit)
        return cast(Backend, backend)
    registered = _REGISTERED(dist.Backend).get(name.upper())
    if registered is None:
        raise RuntimeError(f"this torch cannot carry messages between devices of kind {device.type!r} by {name}")
    if not registered.extended_api:
        return cast(Backend, registered.creator_fn(store, rank, num_ranks, limit))
    options = _BACKEND_OPTIONS()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, num_ranks, limit
    options.global_ranks_in_group = list(range(num_ranks))
    return cast(Backend, registered.creator_fn(options, None))


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Have a backend of NCCL made without its watchdog.

    That is a thread that looks at messages too. Where one has failed, since a peer has given up its step, it holds the
    backend up for a minute and then ends the process; and a monitor ends those of all ranks some minutes later.
    """
    previous_value = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if previous_value is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = previous_value


def mesh_without_groups(name: str, size: int, rank: int, device_type: str = "cpu") -> DeviceMesh:
    """Return the mesh of ranks that are threads of this process, as one of them sees it: it says where DTensors lie."""
    return DeviceMesh(device_type, torch.arange(size), mesh_dim_names=(name,), _init_backend=False, _rank=rank)


def is_timeout(error: Exception) -> bool:
    """Whether a wait for a message of gloo has run out of time."""
    return "Timed out" in str(error)
