"""Training sequences by their numbers: the source of each, its place there, and its tokens, found in constant time.

A `Mixture` says from which source a sequence is, `permuted` shuffles the sequences of a source, and a `Source` is cut:

    windows     tokens:  a b c 0 d e 0 f g h i 0      windows of batch.length, one after another
                         └─────┴─────┴─────┴          neighbours share a token: the last target, the first input
    none        tokens:  a b c 0 d e 0 f g h i 0      a document each, as much of it as batch.length takes
                         └─────┘ └───┘ └─────┘

The end of the tokens is held out. The rest is shuffled anew in every epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_EPOCHS = 1 << 32
SEED_OF_SOURCE = 1 << 20
LOOK_AT_ONCE = 1 << 20
"""Tokens that are read at once in the search for the end of a document."""
Ids = NDArray[np.unsignedinteger]
Span = tuple[int, int]
"""The first token of a sequence, and the end behind its last target."""
NUM_ROUNDS = 6
WORD_MASK = (1 << 64) - 1
PATTERN_LENGTH = 1 << 16
"""About the number of sequences after which the pattern repeats: shares are exact to so small a part."""
OFFSETS = 1 << 10
"""The number of places in the pattern at which a seed may let a source begin."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one length over the tokens from `begin` to `end`."""

    begin: int
    end: int
    length: int

    def __len__(self) -> int:
        # Neighbouring windows share one token: the last target of one is the first input of the next.
        return max(0, (self.end - self.begin - 1) // self.length)

    def __getitem__(self, index: int) -> Span:
        first = self.begin + index * self.length
        return first, first + self.length + 1


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents, each cut to `length` inputs; `document_ends` has, of all documents, the tokens up to their ends."""

    document_ends: NDArray[np.signedinteger]
    numbers: NDArray[np.signedinteger]
    """Indices into `document_ends` of the documents that are sequences here."""
    length: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Span:
        number = int(self.numbers[index])
        begin = int(self.document_ends[number - 1]) if number else 0
        return begin, min(int(self.document_ends[number]), begin + self.length + 1)


Spans = Windows | Documents
"""Spans of training or held-out sequences, by number from 0."""


class Source:
    """The sequences of one source: those to train on, and those that are held out."""

    def __init__(
        self,
        tokens: Ids,
        *,
        length: int,
        held_out_fraction: float = 0.0,
        end_of_document: int | None = None,
        document_ends: NDArray[np.signedinteger] | None = None,
        by_document: bool = False,
        seed: int = 0,
        number: int = 0,
    ) -> None:
        """Cut tokens into sequences of `length`, and hold out the end of the tokens.

        By default, sequences are windows over all tokens, of which neighbors share one token; with `by_document` each
        begins with a document, and `document_ends` says where documents end. With an `end_of_document` token, held-out
        windows begin with a document, so that no document is in both parts. Sequences for training are shuffled by
        `seed` and by `number`, which is that of the source among several.
        """
        self.tokens = tokens
        self.document_ends = document_ends
        # Each source has a range of seeds of its own, with one seed for each epoch.
        self._seed = (seed + number * SEED_OF_SOURCE) * MOST_EPOCHS
        # Tokens before the cut are for training, those behind it are held out.
        cut = len(tokens) - int(len(tokens) * held_out_fraction)
        self.num_train_tokens = cut
        self.train: Spans
        self.held_out: Spans
        if by_document and document_ends is not None:
            # A document that begins before the cut is for training.
            lengths = np.diff(document_ends, prepend=0)
            numbers = np.flatnonzero(lengths > 1)  # a document of one token has nothing to predict
            is_train = document_ends[numbers] - lengths[numbers] < cut
            self.train = Documents(document_ends, numbers[is_train], length)
            self.held_out = Documents(document_ends, numbers[~is_train], length)
        else:
            self.train = Windows(0, cut, length)
            self.held_out = Windows(cut + _rest_of_document(tokens[cut:], end_of_document), len(tokens), length)

    def train_span(self, number: int) -> Span:
        """Return a training sequence; an epoch, so many of them as there are, has each once."""
        epoch, index = divmod(number, len(self.train))
        return self.train[permuted(index, len(self.train), seed=self._seed + epoch)]

    def positions(self, span: Span) -> NDArray[np.int64]:
        """Return, per input of a sequence, how many tokens of its document are before it in the sequence."""
        begin, end = span
        assert self.document_ends is not None, "positions need the ends of the documents"
        first, last = np.searchsorted(self.document_ends, [begin, end - 1], side="right")
        begins = np.concatenate([[begin], self.document_ends[first:last]])  # of the documents within the sequence
        lengths = np.diff(np.append(begins, end - 1))
        positions: NDArray[np.int64] = np.arange(end - 1 - begin) - np.repeat(begins - begin, lengths)
        return positions


def _rest_of_document(tokens: Ids, end_of_document: int | None) -> int:
    """Return how many of the first tokens are the rest of a document; 0 if the rest is half of all tokens or more."""
    half = len(tokens) // 2 if end_of_document is not None else 0
    for first in range(0, half, LOOK_AT_ONCE):
        positions = np.flatnonzero(tokens[first : min(first + LOOK_AT_ONCE, half)] == end_of_document)
        if len(positions):
            return first + int(positions[0]) + 1
    return 0


def permuted(index: int, size: int, *, seed: int) -> int:
    """Return where a shuffle of `range(size)` puts `index`, in constant time and memory; each seed gives another one.

    A balanced Feistel network permutes the numbers below a power of four, whatever its round function does; numbers
    that fall outside the wanted size are sent through it again until they fall inside (cycle walking; Black and
    Rogaway, 2002). The power of four is less than four times the size, so that takes fewer than four passes on average.

    Raises:
        IndexError: the index is not in `range(size)`.
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} is not in range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [_mix(seed * NUM_ROUNDS + turn) for turn in range(NUM_ROUNDS)]
    while True:
        index = _feistel(index, half_bits, keys)
        if index < size:
            return index


def _feistel(value: int, half_bits: int, keys: list[int]) -> int:
    mask = (1 << half_bits) - 1
    left_half, right_half = value >> half_bits, value & mask
    for key in keys:
        left_half, right_half = right_half, left_half ^ (_mix(right_half ^ key) & mask)
    return (left_half << half_bits) | right_half


def _mix(value: int) -> int:
    """Spread every input bit over the 64 output bits (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & WORD_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return value ^ (value >> 31)


class Mixture:
    """The pattern of some weights, which are above 0; a seed chooses where each source begins in it.

    The pattern repeats. In it the sequences of each source are spread evenly, so that any stretch has about the shares
    of the weights, as in weights 2 and 1:

        sequence   0  1  2  3  4  5  6 ...
        source     0  1  0  0  1  0  0 ...      number within the source   0  0  1  2  1  3  4 ...
    """

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
        counts_of_rest = np.bincount(self._sources[:rest], minlength=len(self._counts))
        return [
            turns * count + int(num_in_rest) for count, num_in_rest in zip(self._counts, counts_of_rest, strict=True)
        ]
