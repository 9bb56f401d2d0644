"""One source of text cut into sequences: which of its tokens each has, found in constant time.

    windows     tokens:  a b c 0 d e 0 f g h i 0      windows of batch.length, one after another
                         └─────┴─────┴─────┴          neighbours share a token: the last target, the first input
    none        tokens:  a b c 0 d e 0 f g h i 0      a document each, as much of it as batch.length takes
                         └─────┘ └───┘ └─────┘

The end of the tokens is held out. What is trained on is shuffled anew in every epoch.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.train.data.permutation import permuted

MOST_EPOCHS = 1 << 32
SEED_OF_SOURCE = 1 << 20
LOOK_AT_ONCE = 1 << 20
"""Tokens, in the search for the end of a document."""
Ids = NDArray[np.unsignedinteger]
Span = tuple[int, int]
"""The first token of a sequence, and the end behind its last target."""


class Spans(Protocol):
    """Sequences with numbers from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Span: ...


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
    """Documents, each cut to one length; `ends` are theirs."""

    ends: NDArray[np.signedinteger]
    numbers: NDArray[np.signedinteger]
    """The documents that are taken."""
    length: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Span:
        number = int(self.numbers[index])
        begin, end = begin_of(self.ends, number), int(self.ends[number])
        return begin, min(end, begin + self.length + 1)


class Source:
    """The sequences of one source: those to train on, and those that are held out."""

    def __init__(
        self,
        tokens: Ids,
        *,
        length: int,
        held_out_fraction: float = 0.0,
        end_of_document: int | None = None,
        ends: NDArray[np.signedinteger] | None = None,
        by_document: bool = False,
        seed: int = 0,
        number: int = 0,
    ) -> None:
        """Cut the tokens; `ends` of the documents are needed for sequences by document.

        With an `end_of_document`, held-out tokens begin with a document, so that none is in both parts. `number` is
        that of the source among several.
        """
        self.tokens = tokens
        self.ends = ends
        self._seed = (seed + number * SEED_OF_SOURCE) * MOST_EPOCHS
        cut = len(tokens) - int(len(tokens) * held_out_fraction)
        self.num_train_tokens = cut
        self.train: Spans
        self.held_out: Spans
        if by_document and ends is not None:
            self.train, self.held_out = _documents(ends, cut, length)
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
        assert self.ends is not None, "positions need the ends of the documents"
        first, last = np.searchsorted(self.ends, [begin, end - 1], side="right")
        begins = np.concatenate([[begin], self.ends[first:last]])
        lengths = np.diff(np.append(begins, end - 1))
        positions: NDArray[np.int64] = np.arange(end - 1 - begin) - np.repeat(begins - begin, lengths)
        return positions


def begin_of(ends: NDArray[np.signedinteger], number: int) -> int:
    """Return the first token of a document."""
    return int(ends[number - 1]) if number else 0


def _documents(ends: NDArray[np.signedinteger], cut: int, length: int) -> tuple[Documents, Documents]:
    """Return the documents that begin before the cut, and the others; one of one token has nothing to predict."""
    lengths = np.diff(ends, prepend=0)
    numbers = np.flatnonzero(lengths > 1)
    is_train = ends[numbers] - lengths[numbers] < cut
    return Documents(ends, numbers[is_train], length), Documents(ends, numbers[~is_train], length)


def _rest_of_document(tokens: Ids, end: int | None) -> int:
    """Return how many tokens are of a document that begins before them; none if that is half of them."""
    half = len(tokens) // 2 if end is not None else 0
    for first in range(0, half, LOOK_AT_ONCE):
        ends = np.flatnonzero(tokens[first : min(first + LOOK_AT_ONCE, half)] == end)
        if len(ends):
            return first + int(ends[0]) + 1
    return 0
