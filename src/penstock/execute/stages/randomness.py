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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from penstock.errors import DeadlineExceeded
from penstock.execute.batch.microbatch import Place
from penstock.execute.stages.feature import BeforeLayer, ForwardPart
from penstock.execute.step import Step

# Ranks that are threads share torch's one generator per process and device, so they take turns at it. A backward does,
# too, because a recomputation in it draws. Re-entrant, because a layer may run a pipeline of its own.
_GENERATORS = threading.RLock()

LOSS = -1
"""The place of the loss among the layers."""


def generator_seed(seed: int, step: int, layer: int, place: Place) -> int:
    """Return where a generator starts in a layer's forward; layers are counted in the unsplit model."""
    packed = struct.pack("<5q", seed, step, layer, *place)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


class SeededRandomness:
    """What the layers of a rank draw while they run forward in training; `patience_s` is for the generator lock."""

    def __init__(self, seed: int, device: torch.device, patience_s: float = 60.0) -> None:
        self._seed = seed
        self._patience_s = patience_s
        self._generators = default_generators(device)

    def begin(self, step: Step, place: Place) -> "SeededPart":
        """Return what to do in a forward."""
        return SeededPart(self, step.number, place)

    @contextmanager
    def drawing(self, step: int, place: Place) -> Iterator[BeforeLayer]:
        """Yield what to call before each layer with its place in the unsplit model; then set back the generators.

        Raises:
            DeadlineExceeded: another thread has kept the generators for too long.
        """
        with generator_lock(self._patience_s), set_back(self._generators):
            yield partial(self.begin_layer, step, place)

    def begin_layer(self, step: int, place: Place, layer: int) -> None:
        """Put the generators where a layer begins."""
        start = generator_seed(self._seed, step, layer, place)
        for generator in self._generators:
            generator.manual_seed(start)

    def lock(self) -> AbstractContextManager[None]:
        """Keep others from the generators."""
        return generator_lock(self._patience_s)


class SeededPart(ForwardPart):
    """The random numbers of one forward."""

    def __init__(self, randomness: SeededRandomness, step: int, place: Place) -> None:
        self._randomness = randomness
        self._step = step
        self._place = place

    @property
    def before_layer(self) -> BeforeLayer:
        return partial(self._randomness.begin_layer, self._step, self._place)

    def around_forward(self) -> AbstractContextManager[object]:
        return self._randomness.drawing(self._step, self._place)

    @contextmanager
    def around_loss(self) -> Iterator[None]:
        with self._randomness.drawing(self._step, self._place) as before_layer:
            before_layer(LOSS)
            yield

    def around_backward(self) -> AbstractContextManager[None]:
        return self._randomness.lock()


class ReplayedRandomness:
    """Without a seed, has a forward that runs again draw what it drew at first.

    The ranks of a process take turns at its generators, so that nobody draws within another's forward.
    """

    def __init__(self, device: torch.device, patience_s: float = 60.0) -> None:
        self.generators = default_generators(device)
        self.patience_s = patience_s

    def begin(self, step: Step, place: Place) -> "ReplayedPart":
        """Return what to do in a forward."""
        return ReplayedPart(self)


class ReplayedPart(ForwardPart):
    """Where the generators stand when the layers, and the loss function, of one forward begin."""

    def __init__(self, randomness: ReplayedRandomness, first: "ReplayedPart | None" = None) -> None:
        """`first` has the states to begin with, and then to set back, if the forward runs again."""
        self._randomness = randomness
        self._first = first
        self._states: dict[str, list[Tensor]] = {}

    def around_forward(self) -> AbstractContextManager[None]:
        return self._drawing("layers")

    def around_loss(self) -> AbstractContextManager[None]:
        return self._drawing("loss")

    def around_backward(self) -> AbstractContextManager[None]:
        return generator_lock(self._randomness.patience_s)

    def again(self) -> ForwardPart:
        return ReplayedPart(self._randomness, self)

    @contextmanager
    def _drawing(self, what: str) -> Iterator[None]:
        generators = self._randomness.generators
        with generator_lock(self._randomness.patience_s):
            if self._first is None:
                self._states[what] = [generator.get_state() for generator in generators]
                yield
                return
            with set_back(generators):
                for generator, state in zip(generators, self._first._states[what], strict=True):
                    generator.set_state(state)
                yield


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


@contextmanager
def generator_lock(patience_s: float) -> Iterator[None]:
    """Keep other ranks of this process from the generators. Raises: DeadlineExceeded, if one of them keeps them."""
    if not _GENERATORS.acquire(timeout=patience_s):
        raise DeadlineExceeded(
            f"another rank of this process has drawn random numbers for {patience_s:g} s; look at what its "
            "layers do, or raise deadline_s",
            waited_s=patience_s,
        )
    try:
        yield
    finally:
        _GENERATORS.release()
