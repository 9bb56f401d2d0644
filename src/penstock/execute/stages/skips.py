"""Values that layers send past the layers between them (`ps.Skip`), on their way over the stages.

    stage 0 --(output, {"a": a})--> stage 1 --(output, {"a": a})--> stage 2
       puts a                        relays a                          gets a

A value that is got on a later stage travels in the messages of the stages between: what a stage forwards is its output
and all skips that are still open behind it, and their gradients come back the same way. So a skip is nothing but more
outputs and more inputs, which schedules, programs and proofs need not know. Which are open at a border is known before
the first step: of the layers that hold a name, the first puts and the others get.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.execute.stages.feature import ForwardPart, modules_with
from penstock.execute.values.tree import map_leaves, needing_gradient
from penstock.skipping import Skipping


class StageSkipBuffer:
    """The values between the layers that put and those that get, of one microbatch (or slice) on one stage."""

    def __init__(self, arrived: Mapping[str, Any], place: str) -> None:
        """Begin with what has arrived from earlier stages; `place` is for messages."""
        self._values = dict(arrived)
        self._place = place
        self.read_names: set[str] = set()
        """The names of the skips that layers have read."""
        self._records_gradients = torch.is_grad_enabled()
        self._is_closed = False

    def put(self, name: str, value: Any) -> None:
        """Keep a value for layers that get it; a value that a recomputation puts again changes nothing.

        Raises:
            PenstockError: there is one of this name, or its gradient could not come back.
        """
        if self._is_closed:
            return  # a checkpointed layer runs again in the backward
        if name in self._values:
            raise PenstockError(
                f"{self._place}: the skip {name!r} is put twice for one microbatch; put once, and give skips that "
                "begin at different layers names of their own"
            )
        self._require_gradients(name, "put")
        self._values[name] = value

    def get(self, name: str) -> Any:
        """Return the value of this name.

        Raises:
            PenstockError: there is none, or its gradient could not go back.
        """
        if name not in self._values:
            names_put = ", ".join(map(repr, self._values)) or "none"
            raise PenstockError(
                f"{self._place}: the skip {name!r} is got before it is put (there are: {names_put}); the first layer "
                "that holds a Skip of a name must put, once in each forward, and only later ones can get"
            )
        if needing_gradient(self._values[name]) and not self._is_closed:
            self._require_gradients(name, "got")
        self.read_names.add(name)
        return self._values[name]

    def close(self) -> None:
        """End the forward: keep only what a recomputation of it would get again."""
        self._is_closed = True
        self._values = {name: value for name, value in self._values.items() if name in self.read_names}

    def take(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what goes on to the next stage.

        Raises:
            PenstockError: a value is missing.
        """
        missing = [name for name in names if name not in self._values]
        if missing:
            raise PenstockError(
                f"{self._place}: the skip {missing[0]!r} was not put, but a later stage holds a Skip of this name; the "
                "first layer that holds one must put, in each forward; a None will do"
            )
        return {name: self._values[name] for name in names}

    def _require_gradients(self, name: str, act: str) -> None:
        if self._records_gradients and not torch.is_grad_enabled():
            raise PenstockError(
                f"{self._place}: the skip {name!r} is {act} where gradients are off, so its own would be lost; do it "
                "outside of no_grad(), and checkpoint with use_reentrant=False"
            )


@dataclass(eq=False)
class StageSkips:
    """The skips of one stage: those that its layers hold, and those that go past it."""

    layers: InitVar[Sequence[nn.Module]]
    arriving: Sequence[str] = ()
    """Names that are open before the stage, in order."""
    leaving: Sequence[str] = ()
    """Names that are open behind the stage, in order."""
    place: str = "the model"

    def __post_init__(self, layers: Sequence[nn.Module]) -> None:
        self._modules: list[Skipping] = modules_with(layers, Skipping)

    @property
    def is_empty(self) -> bool:
        """Whether the stage has nothing to do with skips."""
        return not (self._modules or self.arriving or self.leaving)

    @contextmanager
    def on(self, buffer: StageSkipBuffer) -> Iterator[None]:
        """Let the layers put into this buffer and get from it, in a forward or in its backward."""
        for module in self._modules:
            module.begin_skips(buffer)
        try:
            yield
        finally:
            for module in self._modules:
                module.end_skips()


class SkipPart(ForwardPart):
    """The skips of one forward: what came with its inputs, and what its layers put and get."""

    def __init__(self, skips: StageSkips) -> None:
        self._skips = skips
        self.buffer = StageSkipBuffer({}, skips.place)

    def arrive(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._skips.arriving:
            return inputs
        output, arrived = inputs[0]
        self.buffer = StageSkipBuffer(arrived, self._skips.place)
        return (output,)

    def around_forward(self) -> AbstractContextManager[None]:
        return self._skips.on(self.buffer)

    def leave(self, outputs: Any) -> Any:
        """Return the output and all skips that are still open. Raises: PenstockError, if one was not put."""
        leaving = self._skips.leaving
        stage_outputs = (outputs, self.buffer.take(leaving)) if leaving else outputs
        self.buffer.close()
        return stage_outputs

    def without_passing(self, inputs: Any, outputs: Any) -> tuple[Any, Any]:
        skips = self._skips
        names = [name for name in skips.arriving if name in skips.leaving and name not in self.buffer.read_names]
        if not (names and inputs):
            return inputs, outputs
        (main_input, arrived), (main_output, leaving) = inputs[0], outputs
        empty = {name: map_leaves(_without_values, arrived[name]) for name in names}
        return ((main_input, arrived | empty),), (main_output, leaving | empty)

    def around_backward(self) -> AbstractContextManager[None]:
        return self._skips.on(self.buffer)

    def again(self) -> ForwardPart:
        return SkipPart(self._skips)


def skip_names(layer: nn.Module) -> list[str]:
    """Return the names of the skips that a layer holds, each once."""
    return list(dict.fromkeys(module.name for module in modules_with([layer], Skipping)))


def open_at(border: int, holders: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names that are open between layer `border - 1` and layer `border`, in the order of their first layers.

    `holders` are, per name, the layers that hold it, in order.
    """
    open_names = [name for name, layers in holders.items() if layers[0] < border <= layers[-1]]
    return sorted(open_names, key=lambda name: (holders[name][0], name))


def _without_values(leaf: Any) -> Any:
    """Return a leaf of the same shape for a leaf that needs a gradient; it takes up the memory of one number."""
    if not (isinstance(leaf, Tensor) and leaf.requires_grad):
        return leaf
    return leaf.detach().new_zeros(()).expand(leaf.shape).requires_grad_()
