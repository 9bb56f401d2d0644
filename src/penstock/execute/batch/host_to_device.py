"""`HostToDevice`: copies what the host has of a batch to the device, ahead of the computations that read it.

    host            queue F0   copy 1 to pinned memory, queue its copy   reserve 2   queue F1   ...
    own stream      copy of 0            copy of 1                                  copy of 2
    current stream             F0 .............................. F1 ..........................

The host never waits, since the memory that it copies from is pinned. A copy runs on a stream of its own, and the
current stream waits for it right before its first use. Its memory is the current stream's, as that of all that is
computed: so it is used again in order, whenever its last holder drops it. It is reserved before the computation of the
microbatch before it is queued. So a copy waits only for what was queued by then, and runs beside that computation; and
the device holds one microbatch more than it computes with, however far the host is ahead.

torch's allocator of pinned memory uses a block again when the copies from it have ended. Memory that the caller has
pinned is copied from directly, and the step does not end before these copies.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.execute.accelerator import is_queued, make_event, make_stream
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.needs import InputNeeds
from penstock.execute.batch.stream import copied
from penstock.execute.transport.device_queue import waiting_of
from penstock.execute.transport.protocol import Transport
from penstock.execute.values.tree import map_leaves

Cut = Callable[[Microbatch], list[Microbatch]]
"""Cuts a microbatch into its slices."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reserved:
    """Memory for the copies of one microbatch; the current stream uses it no more once it has come to `is_free`."""

    targets: Sequence[Tensor]
    is_free: torch.Event


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """The copies of one microbatch, until the current stream waits for them."""

    targets: Sequence[Tensor]
    has_ended: torch.Event
    unshared_targets: Sequence[Tensor]
    """Targets that no other microbatch reads."""


class HostToDevice:
    """The copies of one rank, step by step; its transport says how long the host waits for the device."""

    def __init__(
        self, transport: Transport, device: torch.device, needs: InputNeeds, cut: Cut, *, one_stream: bool = False
    ) -> None:
        """With `one_stream`, copies run among the computations, on the stream that is current."""
        self._transport, self._device, self._needs, self._cut = transport, device, needs, cut
        self._one_stream = one_stream
        self._num_remaining = 0
        self._num_uses: Counter[int] = Counter()
        """Number of microbatches that read a tensor, by the tensor's id."""
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensor that several microbatches read, and its one copy, by the tensor's id."""
        self._reserved: _Reserved | None = None
        self._under_way: dict[int, _UnderWay] = {}
        self._last_caller_copy: torch.Event | None = None
        """Event behind the last copy from memory that the caller has pinned."""

    @cached_property
    def _own_stream(self) -> torch.Stream | None:
        return make_stream(self._device)

    @property
    def _stream(self) -> torch.Stream | None:
        """The stream of the copies; None where the host waits for each."""
        return self._own_stream if self._own_stream is None or not self._one_stream else self._current()

    def begin(self, num_microbatches: int, microbatches: Sequence[Microbatch]) -> None:
        """Begin a step; `microbatches` are those that are there already."""
        self._num_remaining = num_microbatches
        uses = [{id(tensor) for tensor in self._needs.on_host(microbatch)} for microbatch in microbatches]
        self._num_uses = Counter(key for keys in uses for key in keys)

    def copy(self, microbatch: Microbatch, slices: list[Microbatch]) -> list[Microbatch]:
        """Queue the copies of a microbatch, and return its slices with them in place of what the host has."""
        self._num_remaining -= 1
        sources = {id(tensor): tensor for tensor in self._needs.on_host(microbatch)}
        if not sources:
            return slices
        copy_by_id = {key: self._shared[key][1] for key in sources if key in self._shared}
        new = [tensor for key, tensor in sources.items() if key not in copy_by_id]
        plain = [tensor for tensor in new if self._stream is not None and _is_plain(tensor)]
        copy_by_id |= zip(map(id, plain), self._copied(microbatch.index, plain), strict=True)
        # The rest is rare. torch's own copy does: the host waits for it, and a gradient finds its way back.
        copy_by_id |= {id(tensor): tensor.to(self._device) for tensor in new if id(tensor) not in copy_by_id}
        self._shared |= {id(tensor): (tensor, copy_by_id[id(tensor)]) for tensor in new if self._is_shared(tensor)}
        values = (microbatch.args, microbatch.kwargs, microbatch.target)
        args, kwargs, target = map_leaves(lambda leaf: copy_by_id.get(id(leaf), leaf), values)
        microbatch = replace(microbatch, args=args, kwargs=kwargs, target=target)
        # The microbatch is cut again, so that its slices have the strides of a batch that was passed on the device.
        return [
            replace(part, args=device_part.args, kwargs=device_part.kwargs, target=device_part.target)
            for part, device_part in zip(slices, self._cut(microbatch), strict=True)
        ]

    def arrive(self, index: int) -> None:
        """Let the current stream wait for the copies of a microbatch, and reserve memory for those of another one."""
        under_way = self._under_way.pop(index, None)
        if under_way is None:
            return
        self._current().wait_event(under_way.has_ended)
        if self._num_remaining:
            self._reserved = self._reserve(under_way.unshared_targets)

    def end(self, *, has_failed: bool) -> None:
        """End a step: from now on the caller may change its batch. One that `has_failed` has no peers any more.

        Raises:
            PipelineError: the device does not end its copies in time, or waits for a peer that is late or lost.
            RuntimeError: the device has failed.
        """
        while self._under_way:
            # These are left by a step that has failed: whoever gets the memory next waits for these copies.
            self._current().wait_event(self._under_way.popitem()[1].has_ended)
        self._shared.clear()
        self._reserved = None
        last_copy, self._last_caller_copy = self._last_caller_copy, None
        if last_copy is not None:
            waiting_of(self._transport, has_peers=not has_failed)(last_copy.query)

    def _copied(self, index: int, sources: Sequence[Tensor]) -> Sequence[Tensor]:
        """Queue copies on the stream that is for them, and return the tensors that they fill."""
        if not sources:
            return ()
        reserved, self._reserved = self._reserved, None
        if reserved is None or list(map(_layout, reserved.targets)) != list(map(_layout, sources)):
            reserved = self._reserve(sources)
        has_ended = make_event(self._device)
        copies = zip(sources, reserved.targets, strict=True)
        unshared_targets = [target for source, target in copies if not self._is_shared(source)]
        try:
            self._queue_copies(sources, reserved, has_ended)
        finally:  # where one copy cannot be queued, those before it are under way all the same
            has_ended.record(self._stream)
            self._under_way[index] = _UnderWay(reserved.targets, has_ended, unshared_targets)
        return reserved.targets

    def _queue_copies(self, sources: Sequence[Tensor], reserved: _Reserved, has_ended: torch.Event) -> None:
        stream = self._stream
        assert stream is not None
        stream.wait_event(reserved.is_free)
        with stream:
            for source, target in zip(sources, reserved.targets, strict=True):
                is_ready = source.is_pinned() and source.stride() == target.stride()
                if is_ready:
                    self._last_caller_copy = has_ended
                target.copy_(source if is_ready else pinned_copy(source), non_blocking=True)

    def _reserve(self, sources: Sequence[Tensor]) -> _Reserved:
        targets = [torch.empty_like(source, device=self._device) for source in sources]
        is_free = make_event(self._device)
        is_free.record(self._current())
        return _Reserved(targets, is_free)

    def _is_shared(self, tensor: Tensor) -> bool:
        return self._num_uses[id(tensor)] > 1

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def copies_for(transport: Transport, needs: InputNeeds, cut: Cut, *, one_stream: bool = False) -> HostToDevice | None:
    """Return the copies for the stages of a rank; None where the stages compute on the host."""
    device = needs.device
    if device is None or not is_queued(device):
        return None
    return HostToDevice(transport, device, needs, cut, one_stream=one_stream)


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory of the host; it keeps the order of dimensions, and no gaps."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def pinned_or_copied(leaf: Any) -> Any:
    """Return a value in memory of its own; where the host has it, pinned, so that copies to a device read it there."""
    is_ready = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and _is_plain(leaf)
    return pinned_copy(leaf) if is_ready else copied(leaf)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its values alone: dense, without a gradient that must come back."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return type(tensor) is Tensor and is_dense and not tensor.requires_grad


def _layout(tensor: Tensor) -> tuple[object, ...]:
    # The strides are those of a new tensor like it: gaps are left out.
    return tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride()
