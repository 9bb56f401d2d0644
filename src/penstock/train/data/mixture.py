"""`Mixture`: which of several weighted sources each training sequence comes from, found in constant time.

A fixed pattern repeats. In it the sequences of each source are spread evenly, so that any stretch has about the shares
of the weights, as in weights 2 and 1:

    sequence   0  1  2  3  4  5  6 ...
    source     0  1  0  0  1  0  0 ...      number within the source   0  0  1  2  1  3  4 ...
"""

from collections.abc import Sequence

import numpy as np

from penstock.train.data.permutation import permuted

PATTERN_LENGTH = 1 << 16
"""About the number of sequences after which the pattern repeats: shares are exact to so small a part."""
OFFSETS = 1 << 10
"""In how many places the sequences of a source may begin, by seed."""


class Mixture:
    """The pattern of some weights, which are above 0; a seed chooses where each source begins in it."""

    def __init__(self, weights: Sequence[float], *, seed: int = 0) -> None:
        total = sum(weights)
        self._counts = [max(1, round(PATTERN_LENGTH * weight / total)) for weight in weights]
        if len(weights) == 1:
            self._counts = [1]
        moments = [
            (np.arange(count) + (permuted(number % OFFSETS, OFFSETS, seed=seed) + 0.5) / OFFSETS) / count
            for number, count in enumerate(self._counts)
        ]
        # A stable sort: of equal moments the first source's comes first, on every machine.
        order = np.argsort(np.concatenate(moments), kind="stable")
        self._sources = np.repeat(np.arange(len(weights)), self._counts)[order]
        self._numbers = np.concatenate([np.arange(count) for count in self._counts])[order]

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the source of a sequence, and the sequence's number within that source."""
        turn, place = divmod(sequence, len(self._sources))
        source = int(self._sources[place])
        return source, turn * self._counts[source] + int(self._numbers[place])

    def counts(self, num_sequences: int) -> list[int]:
        """Return how many of the first sequences come from each source."""
        turns, rest = divmod(num_sequences, len(self._sources))
        found = np.bincount(self._sources[:rest], minlength=len(self._counts))
        return [turns * count + int(more) for count, more in zip(self._counts, found, strict=True)]
