"""What stages keep: bytes of their parameters, and of what one forward leaves behind for its backward."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.execute.dtensor import local_part
from penstock.execute.stages.stage import Stage


def parameter_bytes(stages: Sequence[Stage]) -> dict[int, int]:
    """Return, per stage of this rank, the bytes of its parameters."""
    return {
        stage.index: sum(local_part(parameter).nbytes for _, parameter in stage.named_parameters()) for stage in stages
    }


class SavedBytes:
    """The bytes that the largest forward of each stage left behind while it was watched.

    A storage that a forward saves several times counts once, and parameters not at all: they are there anyway.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._parameters = {
            local_part(parameter).untyped_storage().data_ptr()
            for stage in stages
            for _, parameter in stage.named_parameters()
        }
        self._current = stages[0].index
        self._seen: set[int] = set()
        self._bytes = 0
        self.largest = {stage.index: 0 for stage in stages}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forwards that run in this thread meanwhile."""
        with ExitStack() as stack:
            for stage in self._stages:
                first = next(iter(stage.layers.values()))
                handle = first.register_forward_pre_hook(lambda *_, index=stage.index: self._begin(index))
                stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._note, _unchanged))
            yield

    def _begin(self, stage: int) -> None:
        self._current, self._bytes = stage, 0
        self._seen.clear()

    def _note(self, tensor: Tensor) -> Tensor:
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() not in self._seen | self._parameters:
            self._seen.add(storage.data_ptr())
            self._bytes += storage.nbytes()
            self.largest[self._current] = max(self.largest[self._current], self._bytes)
        return tensor


def _unchanged(value: Any) -> Any:
    return value
