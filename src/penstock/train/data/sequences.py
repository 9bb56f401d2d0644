"""Training sequences by their numbers: the source of each, its place there, and its tokens, found in constant time.

A `Mixture` says from which source a sequence is, `permuted` shuffles the sequences of a source, and a `Source` is cut:

    windows     tokens:  a b c 0 d e 0 f g h i 0      windows of batch.length, one after another
                         └─────┴─────┴─────┴          neighbours share a token: the last target, the first input
    none        tokens:  a b c 0 d e 0 f g h i 0      a document each, as much of it as batch.length takes
                         └─────┘ └───┘ └─────┘
    whole       tokens:  a b c 0 d e 0 f g h i 0      whole documents, those in a sequence that fill it best
                         └──1──┘ └─1─┘ └───2───┘      (1 and 2 are sequences)

The end of the tokens is held out. The rest is shuffled anew in every epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.models.decoder import IGNORED_TARGET
from penstock.train.data.learned import Ids, ids_of, is_learned
from penstock.train.data.packs import Packs
from penstock.train.settings.data_section import PACKINGS

MOST_EPOCHS = 1 << 32
SEED_OF_SOURCE = 1 << 20
LOOK_AT_ONCE = 1 << 20
"""Tokens that are read at once in the search for the end of a document."""
Span = tuple[int, int]
"""The first token of a sequence, or of a document in it, and the end behind its last target."""
Row = tuple[Span, ...]
"""The spans of a sequence, which follow each other in it; the last token of each is a target only."""
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

    def __getitem__(self, index: int) -> Row:
        first = self.begin + index * self.length
        return ((first, first + self.length + 1),)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Sequences of documents, each cut to `length` inputs."""

    document_ends: NDArray[np.signedinteger]
    """Of all documents of the source, the number of tokens up to their ends."""
    packs: Packs
    """The documents of each sequence."""
    length: int

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Row:
        return tuple(self.span(int(document)) for document in self.packs[index])

    def span(self, document: int) -> Span:
        """Return the tokens of a document that are read."""
        begin = int(self.document_ends[document - 1]) if document else 0
        return begin, min(int(self.document_ends[document]), begin + self.length + 1)


Rows = Windows | Documents
"""Sequences to train on, or held-out ones, by number from 0."""


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
        packing: str = "windows",
        has_marks: bool = False,
        seed: int = 0,
        number: int = 0,
    ) -> None:
        """Cut tokens into sequences of `length`, as `packing` says, and hold out the end of the tokens.

        Windows go over all tokens, and neighbors share one token. With an `end_of_document` token, held-out windows
        begin with a document, so that no document is in both parts. Other sequences are of whole documents, or of the
        beginning of one, and `document_ends` says where documents end. Tokens that `has_marks` are marked ids, of which
        only the learned ones are targets. Sequences for training are shuffled by `seed` and by `number`, which is that
        of the source among several.
        """
        self.tokens = tokens
        self.document_ends = document_ends
        self._has_marks = has_marks
        # Each source has a range of seeds of its own, with one seed for each epoch.
        self._seed = (seed + number * SEED_OF_SOURCE) * MOST_EPOCHS
        # Tokens before the cut are for training, those behind it are held out.
        cut = len(tokens) - int(len(tokens) * held_out_fraction)
        self.num_train_tokens = cut
        self.num_left_out = 0
        """Documents that no sequence can take, or in which nothing would be learned; those of one token aside."""
        self.train: Rows
        self.held_out: Rows
        if PACKINGS[packing].cuts or document_ends is None:
            self.train = Windows(0, cut, length)
            self.held_out = Windows(cut + _rest_of_document(tokens[cut:], end_of_document), len(tokens), length)
        else:
            self.train, self.held_out = self._documents(document_ends, cut, length, packing)

    def _documents(
        self, document_ends: NDArray[np.signedinteger], cut: int, length: int, packing: str
    ) -> tuple[Documents, Documents]:
        """Return the sequences of documents that begin before the cut, which are for training, and of all others."""
        sizes = np.diff(document_ends, prepend=0) - 1  # of inputs
        is_several = PACKINGS[packing].separates
        is_usable = (sizes > 0) & (sizes <= length) if is_several else sizes > 0
        if self._has_marks:
            spans = Documents(document_ends, Packs.of_one(np.flatnonzero(is_usable)), length)
            is_usable[is_usable] = [self.num_targets(spans[index]) > 0 for index in range(len(spans))]
        self.num_left_out = int(((sizes > 0) & ~is_usable).sum())
        is_train = document_ends - sizes - 1 < cut
        parts = [np.flatnonzero(is_usable & is_part) for is_part in (is_train, ~is_train)]
        packs = [Packs.of(part, sizes[part], length) if is_several else Packs.of_one(part) for part in parts]
        return Documents(document_ends, packs[0], length), Documents(document_ends, packs[1], length)

    def train_row(self, number: int) -> Row:
        """Return a training sequence; an epoch, so many of them as there are, has each once."""
        epoch, index = divmod(number, len(self.train))
        return self.train[permuted(index, len(self.train), seed=self._seed + epoch)]

    def num_targets(self, row: Row) -> int:
        """Return how many tokens of a sequence a loss counts."""
        if not self._has_marks:
            return sum(end - begin - 1 for begin, end in row)
        return sum(int(is_learned(self.tokens[begin + 1 : end]).sum()) for begin, end in row)

    def read(self, row: Row, inputs: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Write a sequence into arrays of its length; places behind its end, and what no loss counts, stay as they are.

        The last token of a document is an input only where there is room behind it, where it predicts nothing.
        """
        place = 0
        for begin, end in row:
            tokens = np.asarray(self.tokens[begin:end])
            ids = (ids_of(tokens) if self._has_marks else tokens).astype(np.int64)
            inputs[place : place + len(ids)] = ids[: len(inputs) - place]
            targets = target[place : place + len(ids) - 1]
            targets[:] = np.where(is_learned(tokens[1:]), ids[1:], IGNORED_TARGET) if self._has_marks else ids[1:]
            place += len(ids) - 1

    def positions(self, row: Row, length: int) -> NDArray[np.int64]:
        """Return, per input of a sequence, how many tokens of its document are before it in the sequence."""
        assert self.document_ends is not None, "positions need the ends of the documents"
        begins, place = [], 0  # of the documents, as places in the sequence
        for begin, end in row:
            first, last = np.searchsorted(self.document_ends, [begin, end - 1], side="right")
            begins += [place, *(place - begin + self.document_ends[first:last])]
            place += end - begin - 1
        # Padding goes on as the last document does.
        lengths = np.diff([*begins, length])
        positions: NDArray[np.int64] = np.arange(length) - np.repeat(begins, lengths)
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
