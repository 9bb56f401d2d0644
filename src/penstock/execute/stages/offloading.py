"""Moves what one forward keeps for its backward to the host, and back.

    F         what autograd saves is kept as `SavedTensor`s, by hooks
    OFFLOAD   each storage that nobody else holds is copied to the host and emptied
    RELOAD    the storage gets its memory and its bytes again
    R, I, B   read it as ever

On a device with streams both rows only launch their copies (`CopyStream`). A storage is emptied where the current
stream waits for the copy, which is before the second computation behind it: so the copy runs beside one computation,
for which its memory is still taken. R, I or B wait for what RELOAD has launched.

A storage is emptied in place. So views and strides stay, the leaves of the graph too, and tensors count their changes
on: a change in place is found in I or B, as torch does, also where it came before OFFLOAD.

Whether somebody else holds a storage is counted: its holders are the saved tensors and the inputs known here, and any
other is a reason to leave it where it is. Others are parameters, buffers, the caller's batch, outputs that are to be
sent, carried values, skips, graphs of other microbatches, and whatever a layer or the caller has set aside. For the
count, layers get views of the stage's inputs: a layer that keeps its input holds another tensor than the stage does.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from sys import getrefcount
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.stages.copy_stream import CopyStream, LaunchedCopy
from penstock.execute.stages.feature import ForwardPart
from penstock.execute.stages.passes import SavedForward
from penstock.execute.stages.recompute import Checkpoint
from penstock.execute.step import Step
from penstock.execute.undocumented import num_holders, repeats, version_of
from penstock.execute.values.tree import map_leaves, tensors_of
from penstock.ir.operations import Op
from penstock.ir.program import Program

_OWN = torch.empty(0)
"""A tensor whose storage nobody has as an object."""
Activation = SavedForward | Checkpoint
_NOTE: ContextVar[Callable[[Tensor], object] | None] = ContextVar("_NOTE", default=None)


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedTensor:
    """A tensor that a node of autograd has saved; the node alone holds this."""

    tensor: Tensor
    """The detached tensor, which nobody else holds."""
    version: int
    is_on_host: bool = False

    def problem(self) -> Exception | None:
        """Return why the tensor must not be read now, if so; torch itself looks at no version under hooks."""
        shape = list(self.tensor.shape)
        version = version_of(self.tensor)
        if version != self.version:
            return RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {shape}] is at version {version}; expected version {self.version} instead. "
                "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        if self.is_on_host:
            return PipelineError(
                f"a saved tensor of shape {shape} was read while it is on the host; expected to be read in the "
                "backward of its own microbatch alone. Detach what layers keep for later microbatches, or take the "
                "stage out of the offloaded ones"
            )
        return None


class MovablePart(ForwardPart):
    """The tensors that one forward keeps, where its program moves them to the host."""

    def __init__(self, *, is_checkpoint: bool, is_first: bool, copies: CopyStream | None = None) -> None:
        """`is_checkpoint`: it keeps its inputs alone; `is_first`: these are the batch, which belongs to the caller.

        `copies` run beside the computations; for None the host makes each itself, and goes on when it is over.
        """
        self._copies = copies
        self._is_checkpoint = is_checkpoint
        self._is_first = is_first
        # Weak, so that autograd frees each as its node has run.
        self._saved_refs: list[ref[SavedTensor]] = []
        self._moved: list[tuple[UntypedStorage, Tensor]] = []
        """Each storage that was emptied, and its bytes on the host, between OFFLOAD and RELOAD."""
        self.is_on_host = False

    def arrive(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs if self._is_first else tuple(map_leaves(_viewed, stage_input) for stage_input in inputs)

    def around_forward(self) -> AbstractContextManager[object]:
        # Autograd keeps nothing of a checkpoint: `Recomputation` has hooks that drop what is saved.
        return nullcontext() if self._is_checkpoint else saved_tensors_hooks(self._save, _read)

    def around_loss(self) -> AbstractContextManager[object]:
        return self.around_forward()

    def tensors(self) -> list[Tensor]:
        """Return the saved tensors that are not freed yet."""
        return [saved_tensor.tensor for saved_tensor in self._alive()]

    def offload(self, activation: Activation) -> LaunchedCopy | None:
        """Move what is kept to the host, but for storages that somebody else holds; return what is still under way."""
        self.is_on_host = True
        storages: dict[int, UntypedStorage] = {}
        try:
            storages.update(_held_alone([*self.tensors(), *self._inputs_in(activation)]))
            del activation  # where a copy fails, this frame, which the error holds, is not to keep activations alive
            self._mark(storages)
            if self._copies is not None:
                return self._copies.launch(partial(self._copy_to_host, storages), self._empty_storages)
            while storages:
                self._moved.append(_emptied(storages.popitem()[1]))
        finally:
            storages.clear()
        return None

    def reload(self) -> LaunchedCopy | None:
        """Move everything back; return what is still under way."""
        self._mark({})
        self.is_on_host = False
        if self._copies is not None:
            for storage, copy in self._moved:
                storage.resize_(copy.nbytes)
            return self._copies.launch(self._copy_to_device, self._moved.clear)
        while self._moved:
            storage, copy = self._moved.pop()
            storage.resize_(copy.nbytes)
            _bytes_in(storage).copy_(copy)
        return None

    def _copy_to_host(self, storages: dict[int, UntypedStorage]) -> None:
        while storages:
            _, storage = storages.popitem()
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=True)
            copy.copy_(_bytes_in(storage), non_blocking=True)
            self._moved.append((storage, copy))

    def _empty_storages(self) -> None:
        for storage, _ in self._moved:
            storage.resize_(0)

    def _copy_to_device(self) -> None:
        for storage, copy in self._moved:
            _bytes_in(storage).copy_(copy, non_blocking=True)

    def _save(self, tensor: Tensor) -> SavedTensor:
        if (note := _NOTE.get()) is not None:
            note(tensor)
        saved_tensor = SavedTensor(tensor.detach(), version_of(tensor))
        self._saved_refs.append(ref(saved_tensor))
        return saved_tensor

    def _mark(self, storages: Container[int]) -> None:
        for saved_tensor in self._alive():
            saved_tensor.is_on_host = _is_movable(saved_tensor.tensor) and _address(saved_tensor.tensor) in storages

    def _alive(self) -> Iterator[SavedTensor]:
        return (saved_tensor for reference in self._saved_refs if (saved_tensor := reference()) is not None)

    def _inputs_in(self, activation: Activation) -> Sequence[Tensor]:
        """Return the stage inputs that only `activation` and the graph hold, without values of earlier slices."""
        if self._is_first:
            return []
        if isinstance(activation, Checkpoint):
            return tensors_of(activation.arguments)
        return activation.inputs[: len(activation.inputs) - sum([len(part.leaves) for part in activation.parts])]


def begin_movable(
    places: Mapping[MicrobatchKey, bool],
    is_first: bool,
    step: Step,
    place: MicrobatchKey,
    copies: CopyStream | None = None,
) -> ForwardPart:
    """Return the feature of one forward; `places` are those that are moved, and whether each keeps a checkpoint."""
    if place not in places:
        return ForwardPart()
    return MovablePart(is_checkpoint=places[place], is_first=is_first, copies=copies)


def offloaded_places(program: Program, stage: int) -> dict[MicrobatchKey, bool]:
    """Return the microbatches and slices of a stage that are moved, and whether what is moved is a checkpoint."""
    if Op.OFFLOAD not in program.ops:
        return {}
    again = set(_places(program, stage, Op.RECOMPUTE))
    return {place: place in again for place in _places(program, stage, Op.OFFLOAD)}


@contextmanager
def noting_saved(note: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `note` with what movable forwards save in this thread: of nested hooks torch asks the innermost alone."""
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)


def movable(activation: Activation) -> MovablePart:
    """Return the part of what an offloaded forward keeps."""
    (part,) = _movable(activation)
    return part


def is_on_host(activation: Any) -> bool:
    """Whether what a stage keeps of a forward is between OFFLOAD and RELOAD."""
    return isinstance(activation, SavedForward | Checkpoint) and any(part.is_on_host for part in _movable(activation))


def saved_in(activation: SavedForward) -> list[Tensor]:
    """Return the tensors that autograd has saved of a forward that is offloaded; of others none."""
    return [tensor for part in _movable(activation) for tensor in part.tensors()]


def _movable(activation: Activation) -> list[MovablePart]:
    return [part for part in activation.parts if isinstance(part, MovablePart)]


def _places(program: Program, stage: int, op: Op) -> list[MicrobatchKey]:
    rows = (program.op == op) & (program.stage == stage)
    return list(zip(program.microbatch[rows].tolist(), program.slice[rows].tolist(), strict=True))


def _viewed(leaf: Any) -> Any:
    # Unlike view_as, this keeps the stride of a dimension of one element, on which the layouts of results depend.
    return leaf[...] if isinstance(leaf, Tensor) and _is_plain(leaf) else leaf


@repeats
def _read(saved_tensor: SavedTensor) -> Tensor:
    if (problem := saved_tensor.problem()) is not None:
        del saved_tensor  # the error holds this frame
        raise problem
    return saved_tensor.tensor


def _held_alone(tensors: Sequence[Tensor]) -> dict[int, UntypedStorage]:
    """Return the storages, by address, that these tensors hold and nobody else."""
    movable_tensors = {id(tensor): tensor for tensor in tensors if _is_movable(tensor)}
    num_references: dict[int, int] = {}
    for tensor in movable_tensors.values():
        num_references[_address(tensor)] = num_references.get(_address(tensor), 0) + 1
    return {
        _address(tensor): tensor.untyped_storage()
        for tensor in movable_tensors.values()
        if num_holders(tensor) == num_references[_address(tensor)] and not _is_taken(tensor)
    }


def _is_taken(tensor: Tensor) -> bool:
    """Whether somebody has got at the storage by itself, as Python counts; there is one object for all who have."""
    return getrefcount(tensor.untyped_storage()) > getrefcount(_OWN.untyped_storage())


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has one storage, which is all that it has."""
    is_other = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
    return type(tensor) is Tensor and not is_other


def _is_movable(tensor: Tensor) -> bool:
    if not _is_plain(tensor):
        return False
    storage = tensor.untyped_storage()
    is_shared = storage.device.type == "cpu" and storage.is_shared()  # with other processes
    try:
        has_memory = storage.nbytes() > 0 and storage.data_ptr() != 0
    except RuntimeError:  # zeros of torch's forward mode have none
        return False
    return has_memory and storage.resizable() and not is_shared


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _emptied(storage: UntypedStorage) -> tuple[UntypedStorage, Tensor]:
    """Return a storage without its memory, and a copy of its bytes on the host."""
    copy = _bytes_in(storage).to("cpu", copy=True)
    storage.resize_(0)
    return storage, copy


def _bytes_in(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
