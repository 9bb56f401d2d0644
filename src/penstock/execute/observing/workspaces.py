"""Measures workspaces: the bytes that a pass of a layer takes while it runs and gives back at its end.

    forward of a stage     | layer 0 | layer 1 |    layer 2 and the loss    |      windows, one per layer
    backward of a stage    | layer 2, from the loss on | layer 1 | layer 0 |

    bytes of a window      begin ... peak ... end
    of a forward           peak - end: what is left at the end are activations and outputs
    of a backward          peak - begin, less what is there for longer: the gradients of inputs and weights

A gradient arrives at the inputs of a layer when the backward of the layer is over: there the next window begins.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import Tensor

from penstock.execute.accelerator import AllocatorBytes, allocator_bytes, reset_peak
from penstock.execute.undocumented import address_of
from penstock.execute.undocumented_kernels import SeenKernels
from penstock.execute.values.tensors import local_part
from penstock.execute.values.tree import tensors_of


class Meter(Protocol):
    """Knows how many bytes there are, and the most since `restart`."""

    def watching(self) -> AbstractContextManager[object]:
        """Return the context in which what is to be measured runs."""

    def restart(self) -> int:
        """Begin a window; return the bytes at its begin."""

    def num_bytes(self) -> int:
        """Return the bytes that there are now."""

    def peak_bytes(self) -> int:
        """Return the most bytes since the window began."""


class AllocatorMeter:
    """Asks the allocator of an accelerator, which sees what kernels take for themselves, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most = AllocatorBytes(0, 0)
        """The peaks of the windows before this one, which torch forgets where a window begins."""

    def watching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def restart(self) -> int:
        self._most = self.most()
        reset_peak(self._device)
        return self.num_bytes()

    def num_bytes(self) -> int:
        return self._read(peak=False).allocated

    def peak_bytes(self) -> int:
        return self._read(peak=True).allocated

    def most(self) -> AllocatorBytes:
        """Return the peaks of all windows so far."""
        return AllocatorBytes(*map(max, self._most, self._read(peak=True)))

    def _read(self, *, peak: bool) -> AllocatorBytes:
        return allocator_bytes(self._device, peak=peak) or AllocatorBytes(0, 0)


class StorageMeter:
    """Counts the storages that kernels make, from when they return them until the last tensor of each is gone.

    For devices whose allocator keeps no count, such as the CPU. What a kernel takes for itself is not seen.
    """

    def __init__(self) -> None:
        self._num_bytes = self._peak_bytes = 0
        self._living_bytes: dict[int, int] = {}
        """Bytes of the living storages that are counted, by address."""

    def watching(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = SeenKernels(self._note_kernel)
        return context

    def restart(self) -> int:
        self._peak_bytes = self._num_bytes
        return self._num_bytes

    def num_bytes(self) -> int:
        return self._num_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages that hold tensors which have just been made."""
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            address, num_bytes = address_of(storage), storage.nbytes()
            if num_bytes and address not in self._living_bytes:
                self._living_bytes[address] = num_bytes
                self._num_bytes += num_bytes
                finalize(storage, self._forget, address).atexit = False
        self._peak_bytes = max(self._peak_bytes, self._num_bytes)

    def _note_kernel(self, arguments: Any, results: Any) -> None:
        # A view has the storage of an argument, and so has the result of a kernel that works in place.
        arguments_addresses = {address_of(local_part(tensor).untyped_storage()) for tensor in tensors_of(arguments)}
        made = (local_part(tensor) for tensor in tensors_of(results))
        self.note(part for part in made if address_of(part.untyped_storage()) not in arguments_addresses)

    def _forget(self, address: int) -> None:
        self._num_bytes -= self._living_bytes.pop(address)


def meter_for(device: torch.device) -> Meter:
    """Return what measures the bytes of a device."""
    return StorageMeter() if allocator_bytes(device) is None else AllocatorMeter(device)


Note = Callable[[int, int], object]
"""Gets a layer, and the bytes of one of its workspaces."""


class Workspaces:
    """The windows of one rank's passes, one after another."""

    def __init__(self, meter: Meter, note_forward: Note, note_backward: Note) -> None:
        self._meter = meter
        self._note_forward, self._note_backward = note_forward, note_backward
        self._layer = 0
        """The layer whose window is open."""
        self._begin_bytes = 0
        """Bytes at the begin of the window that is open, with those of gradients that were there then."""
        self._gradient_bytes: Callable[[], int] = int
        self._is_backward = False

    @contextmanager
    def forward(self, first_layer: int, attempt: Callable[..., object]) -> Iterator[None]:
        """Measure the forward of a stage that begins with this layer; `attempt` keeps errors from the layers."""
        self._layer = first_layer
        attempt(self._meter.restart)
        with self._meter.watching():
            yield
        attempt(self._end_forward)

    def enter(self, layer: int, inputs: Any, attempt: Callable[..., object]) -> None:
        """Begin the window of a layer in a forward that runs, and that of the layer before it in its backward."""
        if layer != self._layer:  # the first layer of the stage is in its window from the start
            self._end_forward()
            self._layer = layer
            self._meter.restart()
            for tensor in tensors_of(inputs):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(partial(attempt, self._leave, layer))  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(
        self, layer: int, input_bytes: int, gradient_bytes: Callable[[], int], attempt: Callable[..., object]
    ) -> Iterator[None]:
        """Measure a backward, or a part of one, of a stage that begins with this layer, its last one.

        `input_bytes` are those of the gradients that the stage sends on, and `gradient_bytes` counts gradients of
        weights.
        """
        self._layer, self._gradient_bytes, self._is_backward = layer, gradient_bytes, True
        attempt(self._begin_backward)
        with self._meter.watching():
            yield
        attempt(self._end_backward, input_bytes)
        self._is_backward = False

    def _end_forward(self) -> None:
        self._note_forward(self._layer, self._meter.peak_bytes() - self._meter.num_bytes())

    def _leave(self, layer: int, gradient: Tensor) -> None:
        """End the window of a layer in a backward, when the gradient of one of its inputs has arrived."""
        if self._is_backward:
            self._end_backward(local_part(gradient).nbytes)
            self._layer = layer - 1
            self._begin_backward()

    def _begin_backward(self) -> None:
        self._begin_bytes = self._meter.restart() - self._gradient_bytes()

    def _end_backward(self, input_bytes: int) -> None:
        kept_bytes = self._begin_bytes + self._gradient_bytes() + input_bytes
        self._note_backward(self._layer, self._meter.peak_bytes() - kept_bytes)
