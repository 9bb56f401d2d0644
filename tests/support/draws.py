"""Draws of a model that a test records in a pipeline and repeats in one process.

A forward draws through `drawn(site, key, draw)`. The key is a tensor that every stage computes alike, or that stands
beside the draw, so a draw is found again by its key, whatever generator a pipeline draws from. The record is no part of
the model, so nothing that compares a model's state sees it.
"""

import functools
import itertools
from contextlib import contextmanager

import torch

MAX_CHOICES = 64


@functools.cache
def active():
    """The recording or repeating `RecordedDraws` of this process; threads of ranks share it, and no cut looks here."""
    return []


def drawn(site, key, draw):
    """Return `draw()`, a tensor or a number; a repeating process returns what was recorded at this site for the key."""
    if not active():
        return draw()
    (draws,) = active()
    if draws.is_repeating:
        return draws.repeat(site, key, draw)
    value = draw()
    draws.record(site, key, value)
    return value


class RecordedDraws:
    """Draws of a pipeline's ranks by site and key."""

    def __init__(self):
        self.entries, self.is_repeating, self.choice, self.counts = [], False, (), []

    @contextmanager
    def recording(self):
        yield from self._as_active(False)

    @contextmanager
    def repeating(self, choice=()):
        """Repeat draws; where ranks drew differently for one key, `choice` says per draw whose."""
        self.choice, self.counts = choice, []
        yield from self._as_active(True)

    def choices(self):
        """Yield choices: that of the first draws, then others, once a forward has repeated the first ones."""
        if self.entries:
            yield ()
            counts = tuple(self.counts)
            if max(counts, default=1) > 1:
                yield from itertools.islice(itertools.product(*map(range, counts)), 1, MAX_CHOICES)

    def _as_active(self, is_repeating):
        self.is_repeating = is_repeating
        active().append(self)
        try:
            yield
        finally:
            active().clear()

    def record(self, site, key, value):
        """Keep a copy without reading a value: a stand-in's is looked at when all ranks have ended."""
        copies = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in (key, value)]
        self.entries.append((site, *copies))

    def repeat(self, site, key, draw):
        values = []
        for other_site, other_key, value in self.entries:
            if other_site == site and is_near(other_key, key) and not any(is_near(value, v) for v in values):
                values += [value] if is_real(value) else []
        if not values:
            return draw()
        place = len(self.counts)
        self.counts.append(len(values))
        return values[self.choice[place] if place < len(self.choice) else 0]


def is_real(value):
    """Whether a value is a number, and no stand-in's."""
    if not isinstance(value, torch.Tensor):
        return True
    return type(value) is torch.Tensor and not value.is_meta and not bool(value.isnan().any())


def is_near(value, other):
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(value) is type(other) and value == other
    return (
        is_real(value)
        and value.shape == other.shape
        and torch.allclose(value.double(), other.double(), rtol=0, atol=1e-10)
    )
