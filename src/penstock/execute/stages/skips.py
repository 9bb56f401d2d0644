"""Values that layers hand on past the layers between them (`penstock.models.Skip`), on their way over the stages.

    stage 0 --(output, {"a": a})--> stage 1 --(output, {"a": a})--> stage 2
       puts a                        relays a                          gets a

A value that is got on a later stage travels in the messages of the stages between: what a stage hands on is its output
and all skips that are still open behind it, and their gradients come back the same way. So a skip is nothing but more
outputs and more inputs, which schedules, programs and proofs need not know. Which are open at a border is known before
the first step: of the layers that hold a name, the first puts and the others get.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.execute.methods import has_methods
from penstock.execute.values.tree import flatten, map_leaves

Forward = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class Skipping(Protocol):
    """A module of a layer that hands something on to later layers, such as `penstock.models.Skip`."""

    name: str

    def begin_skips(self, shelf: "Shelf") -> None:
        """Begin a forward or a backward of the layer; what it puts and gets lies on this shelf."""
        ...

    def end_skips(self) -> None:
        """End what was begun, even if it failed."""
        ...


class Shelf:
    """What lies between the layers that put and those that get, for one microbatch (or slice) on one stage."""

    def __init__(self, arrived: Mapping[str, Any], place: str) -> None:
        """Begin with what has arrived from earlier stages; `place` is for messages."""
        self._values = dict(arrived)
        self._place = place
        self.got: set[str] = set()
        """The names that were got."""
        self._records_gradients = torch.is_grad_enabled()
        self._is_closed = False

    def put(self, name: str, value: Any) -> None:
        """Take a value; one that a recomputation puts again is the one that is there.

        Raises:
            PenstockError: there is one of this name, or its gradient could not come back.
        """
        if self._is_closed:
            return
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
            there = ", ".join(map(repr, self._values)) or "none"
            raise PenstockError(
                f"{self._place}: the skip {name!r} is got before it is put (there are: {there}); the first layer that "
                "holds a Skip of a name must put, once in each forward, and only later ones can get"
            )
        if _needs_gradient(self._values[name]) and not self._is_closed:
            self._require_gradients(name, "got")
        self.got.add(name)
        return self._values[name]

    def close(self) -> None:
        """End the forward: keep only what a recomputation of it would get again."""
        self._is_closed = True
        self._values = {name: value for name, value in self._values.items() if name in self.got}

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

    def _require_gradients(self, name: str, done: str) -> None:
        if self._records_gradients and not torch.is_grad_enabled():
            raise PenstockError(
                f"{self._place}: the skip {name!r} is {done} where gradients are off, so its own would be lost; do it "
                "outside of no_grad(), and checkpoint with use_reentrant=False"
            )


class StageSkips:
    """The skips of one stage: those that its layers hold, and those that go past it."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        arriving: Sequence[str] = (),
        leaving: Sequence[str] = (),
        place: str = "the model",
    ) -> None:
        """`arriving` and `leaving` are the names that are open before and behind the stage, in order."""
        self._modules = list(dict.fromkeys(module for layer in layers for module in _skipping(layer)))
        self._arriving = arriving
        self._leaving = leaving
        self._place = place
        self._last: Shelf | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the stage has nothing to do with skips."""
        return not (self._modules or self._arriving or self._leaving)

    def forward(self, run: Forward, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run the layers on what came from the stage before; return what goes to the next one.

        Raises:
            PenstockError: a skip that a later stage needs was not put.
        """
        arrived: Mapping[str, Any] = {}
        if self._arriving:
            output, arrived = inputs[0]
            inputs = (output,)
        shelf = Shelf(arrived, self._place)
        with self.on(shelf):
            output = run(inputs, keywords)
        if self._leaving:
            output = (output, shelf.take(self._leaving))
        shelf.close()
        self._last = shelf if torch.is_grad_enabled() else None
        return output

    def spared(self, inputs: Any, outputs: Any) -> tuple[Any, Any]:
        """Return what came and what goes, for the backward: what only goes past, without its values."""
        got = self._last.got if self._last is not None else ()
        names = [name for name in self._arriving if name in self._leaving and name not in got]
        if not (names and inputs):
            return inputs, outputs
        (main_input, arrived), (main_output, leaving) = inputs[0], outputs
        empty = {name: map_leaves(_without_values, arrived[name]) for name in names}
        return ((main_input, arrived | empty),), (main_output, leaving | empty)

    def pop_shelf(self) -> Shelf | None:
        """Return the shelf of the forward just run, for its backward."""
        shelf, self._last = self._last, None
        return shelf

    @contextmanager
    def on(self, shelf: Shelf | None) -> Iterator[None]:
        """Let the layers put on this shelf, if there is one, and get from it, in a forward or in its backward."""
        modules = [] if shelf is None else self._modules
        for module in modules:
            assert shelf is not None
            module.begin_skips(shelf)
        try:
            yield
        finally:
            for module in modules:
                module.end_skips()


def skip_names(layer: nn.Module) -> list[str]:
    """Return the names of the skips that a layer holds, each once."""
    return list(dict.fromkeys(module.name for module in _skipping(layer)))


def _skipping(layer: nn.Module) -> list[Skipping]:
    return [cast(Skipping, module) for module in layer.modules() if has_methods(module, Skipping)]


def open_at(border: int, holders: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names that are open between layer `border - 1` and layer `border`, in the order of their first layers.

    `holders` are, per name, the layers that hold it, in order.
    """
    found = [name for name, layers in holders.items() if layers[0] < border <= layers[-1]]
    return sorted(found, key=lambda name: (holders[name][0], name))


def _without_values(leaf: Any) -> Any:
    """A leaf for the gradient of one like this that needs it; it takes up the memory of one number."""
    if not (isinstance(leaf, Tensor) and leaf.requires_grad):
        return leaf
    return leaf.detach().new_zeros(()).expand(leaf.shape).requires_grad_()


def _needs_gradient(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(tree)[0])
