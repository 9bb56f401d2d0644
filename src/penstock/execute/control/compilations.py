"""Compilation outside every deadline: ranks say before a step whether one may compile in it, and then wait longer.

A first compilation takes a minute and more, and only its own rank sees that it runs. So a rank with compiled layers
says in the agreement on each step how many compilations it has begun. As all ranks know these numbers, all of them know
which batch layouts have run without one. In a step of any other layout every wait lasts up to `COMPILE_DEADLINE_S`;
a rank that dies meanwhile closes its connections, which its peers see at once.

Guarantees: all ranks wait equally long in a step, and a rank counts its own compilations only, also where ranks are
threads. Relies on: torch calls back on the thread that compiles, and a backward on the CPU is compiled on the thread
that runs it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import getattr_static
from typing import Any

from torch import Tensor, nn

from penstock.errors import warn
from penstock.execute.control.agreement import AgreedStep
from penstock.execute.control.positions import PositionBoard, State
from penstock.execute.transport.agreed_layouts import MAX_LAYOUTS
from penstock.execute.transport.places import Places
from penstock.execute.transport.world import shares_process
from penstock.execute.undocumented_compiler import is_compiled, watch_compilations

COMPILE_DEADLINE_S = 1800.0
"""The limit of every wait in a step in which a rank may compile."""
MANY = 4
"""Training steps one after another, each with a compilation, after which a warning says so."""


class Compilations:
    """The compilations of all ranks, as far as they are known; the same on each of them."""

    def __init__(self, places: Places, board: PositionBoard, layers: Sequence[nn.Module]) -> None:
        self.has_compiled_layers = any(map(_holds_compiled, layers))
        self._transports = places.transports
        self._board = board
        self._layers = layers
        self._shares_process = any(map(shares_process, places.transports))
        self._num_begun = 0
        self._settled_layouts: dict[str, None] = {}
        """The last batch layouts in whose last step no rank compiled anything, in the order of these steps."""
        self._last_step: tuple[str, Sequence[int]] | None = None
        """Layout of the last step, and the numbers that all ranks reported before it."""
        self._recent_shapes: deque[str] = deque(maxlen=MANY)
        """The shapes of the last training steps, as long as each has compiled something."""
        self._is_warned = False

    def num_reported(self) -> int:
        """Return what this rank reports before a step: 0 if it compiles nothing, else 1 and its compilations so far."""
        # The layers are looked at again each time: they may be compiled after the pipeline was made.
        is_compiling = self.has_compiled_layers or any(map(is_compiled, self._layers))
        return self._num_begun + is_compiling

    def forget(self) -> None:
        """Forget the last step: it failed, so nobody knows what it would have compiled."""
        self._last_step = None

    @contextmanager
    def in_step(self, agreed: AgreedStep, batch_values: Sequence[Any]) -> Iterator[None]:
        """Run a step in here; a warning shows the shapes of the tensors among this rank's `batch_values`."""
        num_before = self._num_begun
        with ExitStack() as stack:
            if self._may_compile(agreed):
                for transport in self._transports:
                    stack.enter_context(transport.waiting(COMPILE_DEADLINE_S))
            stack.callback(self._watch())
            yield
        if agreed.is_training:
            self._note_step(batch_values, has_compiled=self._num_begun > num_before)

    def _may_compile(self, agreed: AgreedStep) -> bool:
        if not any(agreed.compilations):
            return False
        if self._last_step is not None:
            layout, previous_counts = self._last_step
            self._settled_layouts.pop(layout, None)  # the newest comes last
            if previous_counts == agreed.compilations:
                self._settled_layouts[layout] = None
            if len(self._settled_layouts) > MAX_LAYOUTS:  # waiting too long for a forgotten one does no harm
                del self._settled_layouts[next(iter(self._settled_layouts))]
        self._last_step = agreed.job_signature, agreed.compilations
        return agreed.job_signature not in self._settled_layouts

    def _watch(self) -> Callable[[], None]:
        thread = threading.get_ident()

        def is_own_compilation() -> bool:
            # On a GPU a backward is compiled on a thread of autograd; ranks that are threads compute on the CPU.
            return not self._shares_process or threading.get_ident() == thread

        def begin() -> None:
            if is_own_compilation():
                self._num_begun += 1
                self._board.note_state(State.COMPILING)

        return watch_compilations(begin, lambda: self._board.note_run() if is_own_compilation() else None)

    def _note_step(self, batch_values: Sequence[Any], *, has_compiled: bool) -> None:
        if not has_compiled:
            self._recent_shapes.clear()
            return
        shapes = [str(tuple(value.shape)) for value in batch_values if isinstance(value, Tensor)]
        self._recent_shapes.append(" and ".join(shapes) or "known to other ranks")
        if len(self._recent_shapes) == MANY and not self._is_warned:
            self._is_warned = True
            warn(
                f"{self._board.name}: compiled layers were compiled again in each of the last {MANY} steps, whose "
                f"batches had the shapes {'; '.join(self._recent_shapes)}. Pad batches to a few shapes, mark what "
                "varies by torch._dynamo.mark_dynamic, or see why with TORCH_LOGS=recompiles"
            )


def _holds_compiled(layer: nn.Module) -> bool:
    """Whether torch compiles a layer, a module in it, or a function that a module holds or that its forward names."""
    for module in layer.modules():
        forward = getattr_static(type(module), "forward")  # torch.jit's fails where no module is at hand
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        called = [getattr(forward, "__globals__", {}).get(name) for name in names]
        if any(map(is_compiled, (module, forward, *vars(module).values(), *called))):
            return True
    return False
