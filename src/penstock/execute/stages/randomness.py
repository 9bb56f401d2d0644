"""Random numbers that do not depend on the split: dropout draws the same on one rank and on many, in any schedule.

Where a layer, or the loss, runs forward, torch's default generators stand where (seed, step, layer, microbatch, slice)
puts them; afterwards they stand where the caller had left them. A recomputation by activation checkpointing draws again
what its forward drew, for it sets the generators back by itself (`preserve_rng_state`).

Setting a generator costs two or three microseconds per layer. (`torch.manual_seed`, which sets those of all devices,
takes a hundred times as long, and a generator of one's own is not what dropout draws from.) torch's generator of the
CPU uses 32 bits of a seed, so that two layers of a long training may draw alike once in a while.
"""

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from hashlib import blake2b
from typing import Any

import torch

from penstock.errors import DeadlineExceeded
from penstock.execute.batch.step import Place
from penstock.execute.calls import Bound, Call, Change, around_each
from penstock.execute.stages.stage import BeforeLayer, Stage
from penstock.ir.operations import RUNS_AUTOGRAD, RUNS_FORWARD
from penstock.ir.program import Program

# Ranks that are threads share torch's one generator per process and device, so they take turns at it. A backward does,
# too, because a recomputation in it draws. Re-entrant, because a layer may run a pipeline of its own.
_GENERATOR_TURN = threading.RLock()

LOSS = -1
"""The place of the loss among the layers."""


def generator_seed(seed: int, step: int, layer: int, place: Place) -> int:
    """Return where a generator starts in a layer's forward; layers are counted in the unsplit model."""
    packed = struct.pack("<5q", seed, step, layer, *place)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


class Randomness:
    """What the layers of one rank draw while they run forward in training; `patience_s` is for its turns."""

    def __init__(self, seed: int, device: torch.device, patience_s: float = 60.0) -> None:
        self._patience_s = patience_s
        self.step = 0
        """The number of the training step at hand."""
        self._seed = seed
        self._place: Place = (0, 0)
        self._generators = default_generators(device)

    @contextmanager
    def forward(self, place: Place) -> Iterator[BeforeLayer]:
        """Yield what to call before each layer with its place in the unsplit model; then set back the generators.

        Raises:
            DeadlineExceeded: another thread has kept the generators for too long.
        """
        with turn(self._patience_s), set_back(self._generators):
            yield partial(self._begin_layer, place)

    def around_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loss function as one that draws by this rule, for the forward at hand."""

        @wraps(loss)
        def drawing(*args: Any, **kwargs: Any) -> Any:
            with self.forward(self._place) as before_layer:
                before_layer(LOSS)
                return loss(*args, **kwargs)

        return drawing

    def change(self, program: Program, stages: Sequence[Stage]) -> Change:
        """Return what makes the calls of a training program draw by this rule."""
        of_index = {stage.index: stage for stage in stages}

        def wrap(bound: Bound) -> Call:
            op = program.op[bound.row]
            if bound.receive_row is not None or not (RUNS_FORWARD[op] or RUNS_AUTOGRAD[op]):
                return bound.call
            if RUNS_AUTOGRAD[op]:
                return in_turn(bound.call, self._patience_s)
            place = int(program.microbatch[bound.row]), int(program.slice[bound.row])
            return self._drawing(of_index[int(program.stage[bound.row])], place, bound.call)

        return around_each(wrap)

    def _begin_layer(self, place: Place, layer: int) -> None:
        start = generator_seed(self._seed, self.step, layer, place)
        for generator in self._generators:
            generator.manual_seed(start)

    def _drawing(self, stage: Stage, place: Place, call: Call) -> Call:
        def forward() -> None:
            self._place = place
            stage.drawing = partial(self.forward, place)
            try:
                call()
            finally:
                stage.drawing = None

        return forward


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers draw from on a device."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        current = torch.cuda.current_device()  # CUDA begins here at the latest, and with it there are generators
        index = current if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


@contextmanager
def set_back(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Leave the generators as they are, whatever is drawn inside."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def in_turn(call: Call, patience_s: float) -> Call:
    """Return the call as one that has the generators to itself."""

    def run() -> None:
        with turn(patience_s):
            call()

    return run


@contextmanager
def turn(patience_s: float) -> Iterator[None]:
    """Keep other ranks of this process from the generators. Raises: DeadlineExceeded, if one of them keeps them."""
    if not _GENERATOR_TURN.acquire(timeout=patience_s):
        raise DeadlineExceeded(
            f"another rank of this process has drawn random numbers for {patience_s:g} s; look at what its "
            "layers do, or raise deadline_s",
            waited_s=patience_s,
        )
    try:
        yield
    finally:
        _GENERATOR_TURN.release()
