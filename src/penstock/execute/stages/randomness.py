"""Random numbers that do not depend on the split: dropout draws the same on one rank and on many, in any schedule.

Where a layer, or the loss, runs forward, torch's default generators stand where (seed, step, layer, microbatch, slice)
puts them; afterwards they stand where the caller had left them. A recomputation by activation checkpointing draws again
what its forward drew, for it sets the generators back by itself (`preserve_rng_state`).

Setting a generator costs two or three microseconds per layer. (`torch.manual_seed`, which sets those of all devices,
takes a hundred times as long, and a generator of one's own is not what dropout draws from.) torch's generator of the
CPU uses 32 bits of a seed, so that two layers of a long training may draw alike once in a while.

Guarantees: in training with a seed, or with forwards that run again, no rank of the process draws within a forward or
backward of another. Relies on: nothing else draws meanwhile from torch's default generators; a thread of the caller's
is not kept from them.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from penstock.errors import DeadlineExceeded
from penstock.execute.accelerator import default_generator, is_queued
from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.stages.feature import BeforeLayer, ForwardPart
from penstock.running_time import wait_in_parts

# Ranks that are threads share torch's one generator per process and device, so they take turns at it. A backward does,
# too, because a recomputation in it draws. Re-entrant, because a layer may run a pipeline of its own.
_GENERATORS = threading.RLock()

LOSS = -1
"""The place of the loss among the layers."""


def generator_seed(seed: int, step: int, layer: int, place: MicrobatchKey) -> int:
    """Return where a generator starts in a layer's forward; layers are counted in the unsplit model."""
    packed = struct.pack("<5q", seed, step, layer, *place)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True, eq=False)
class Randomness:
    """The generators that the layers of a rank and its loss function draw from while they run forward in training."""

    seed: int | None
    """Without one, a forward that runs again draws what it drew at first, and nothing else is changed."""
    generators: Sequence[torch.Generator]
    first_microbatch: int = 0
    """Where this replica's microbatches are counted from: behind those of the replicas before it."""
    max_wait_s: float = 60.0
    """Seconds to wait for the generator lock: the ranks of a process take turns at drawing."""


class RandomPart(ForwardPart):
    """Where the generators stand when the layers, and the loss function, of one forward begin."""

    def __init__(self, randomness: Randomness, step: int, place: MicrobatchKey) -> None:
        """`step` is the number of the step."""
        self._randomness = randomness
        self._step = step
        self._place = randomness.first_microbatch + place[0], place[1]
        self._first: RandomPart | None = None
        """The part of the first run, where this forward runs again."""
        self._states: dict[str, list[Tensor]] = {}

    @property
    def before_layer(self) -> BeforeLayer | None:
        return None if self._randomness.seed is None else partial(self._begin_layer, self._randomness.seed)

    def around_forward(self) -> AbstractContextManager[object]:
        return self._drawing("layers")

    @contextmanager
    def around_loss(self) -> Iterator[None]:
        with self._drawing("loss"):
            if self.before_layer is not None:
                self.before_layer(LOSS)
            yield

    def around_backward(self) -> AbstractContextManager[None]:
        return generator_lock(self._randomness.max_wait_s)

    def again(self) -> ForwardPart:
        part = copy(self)
        part._first, part._states = self, {}
        return part

    @contextmanager
    def _drawing(self, consumer: str) -> Iterator[None]:
        """Keep others from the generators, and set these back afterwards, except behind the first run without a seed.

        Raises:
            DeadlineExceeded: another thread has kept the generators for too long.
        """
        randomness = self._randomness
        with generator_lock(randomness.max_wait_s):
            states = [generator.get_state() for generator in randomness.generators]
            if randomness.seed is None and self._first is None:
                self._states[consumer] = states
                yield
                return
            try:
                if randomness.seed is None and self._first is not None:
                    _set_states(randomness.generators, self._first._states[consumer])
                yield
            finally:
                _set_states(randomness.generators, states)

    def _begin_layer(self, seed: int, layer: int) -> None:
        start = generator_seed(seed, self._step, layer, self._place)
        for generator in self._randomness.generators:
            generator.manual_seed(start)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers draw from on a device."""
    generators = [torch.default_generator]
    device_generator = default_generator(device) if is_queued(device) else None
    return generators if device_generator is None else [*generators, device_generator]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@contextmanager
def generator_lock(max_wait_s: float) -> Iterator[None]:
    """Keep other ranks of this process from the generators. Raises: DeadlineExceeded, if one of them keeps them."""
    if not wait_in_parts(lambda part_s: _GENERATORS.acquire(timeout=part_s), max_wait_s):
        raise DeadlineExceeded(
            f"another rank of this process has drawn random numbers for {max_wait_s:g} s; look at what its "
            "layers do, or raise deadline_s",
            waited_s=max_wait_s,
        )
    try:
        yield
    finally:
        _GENERATORS.release()
