"""Batches of token windows: shuffled by seed, the same on every rank, found by step in constant time.

Tokens and target are int64 [batch, length]: sequences per batch, tokens per sequence. The target is the token that
follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.train.batches import Batch, Wants
from penstock.train.config import RunConfig
from penstock.train.corpus import FILES_KEY, TextFiles, find_documents, find_standard_library
from penstock.train.permutation import permuted
from penstock.train.tokenizer import load_tokenizer
from penstock.train.tokens import Tell, tokenize

EVERYTHING = Wants()
MOST_EPOCHS = 1 << 32
LOOK_AT_ONCE = 1 << 20
"""Tokens, in the search for the end of a document."""


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """How tokens are cut into windows and batches."""

    batch_size: int
    """Sequences per batch."""
    length: int
    """Tokens per sequence."""
    seed: int = 0
    held_out_fraction: float = 0.05
    """Share of the tokens, from the end, that is never trained on; at least 0, below 1."""
    end_of_document: int | None = None
    """The token that ends a document. With it, held-out tokens begin with a document, so that none is in both parts."""


class TokenDataset:
    """Windows over one array of tokens: its end is held out, the rest is shuffled anew in every epoch.

    `vocabulary` bounds the token ids; `digest` is equal on two machines that hold the same tokens.
    """

    def __init__(
        self, tokens: NDArray[np.unsignedinteger], options: WindowOptions, *, vocabulary: int = 256, digest: str = ""
    ) -> None:
        """Cut the tokens.

        Raises:
            ConfigError: the training part is shorter than one window.
        """
        num_held_out = int(len(tokens) * options.held_out_fraction)
        self.vocabulary = vocabulary
        self.digest = digest
        self.train_tokens = tokens[: len(tokens) - num_held_out]
        self.held_out_tokens = _from_next_document(tokens[len(tokens) - num_held_out :], options.end_of_document)
        self._options = options
        if self.num_windows < 1:
            raise ConfigError(
                f"the corpus has {len(self.train_tokens)} tokens to train on, but one window of batch.length = "
                f"{options.length} needs {options.length + 1}; name more text, or lower batch.length",
                key=FILES_KEY,
            )

    @property
    def num_windows(self) -> int:
        """Windows to train on; one epoch visits each of them once."""
        return _count_windows(self.train_tokens, self._options.length)

    @property
    def num_held_out_windows(self) -> int:
        return _count_windows(self.held_out_tokens, self._options.length)

    def batch(self, number: int, wants: Wants = EVERYTHING) -> Batch:
        """Return a batch, counted from 0; any one, in any order, is found in the same time."""
        first = number * self._options.batch_size
        places = range(first, first + self._options.batch_size)
        return self._gather(self.train_tokens, [self._window_at(place) for place in places], wants)

    def held_out_batches(self, num_batches: int, wants: Wants = EVERYTHING) -> list[Batch]:
        """Return batches spread evenly over the held-out tokens: always the same, fewer where these do not suffice.

        Raises:
            ConfigError: the held-out tokens do not fill one batch.
        """
        size = self._options.batch_size
        num_batches = min(num_batches, self.num_held_out_windows // size)
        if num_batches < 1:
            raise ConfigError(
                f"the held-out part has {self.num_held_out_windows} windows of {self._options.length} tokens, "
                f"fewer than batch.size = {size}; name more text, or raise data.held_out_fraction",
                key="data.held_out_fraction",
            )
        num_wanted = num_batches * size
        windows = [place * self.num_held_out_windows // num_wanted for place in range(num_wanted)]
        return [self._gather(self.held_out_tokens, windows[at : at + size], wants) for at in range(0, num_wanted, size)]

    def _window_at(self, place: int) -> int:
        epoch, index = divmod(place, self.num_windows)
        return permuted(index, self.num_windows, seed=self._options.seed * MOST_EPOCHS + epoch)

    def _gather(self, tokens: NDArray[np.unsignedinteger], windows: list[int], wants: Wants) -> Batch:
        if not (wants.inputs or wants.target):
            return Batch()
        length = self._options.length
        starts = np.array(windows, dtype=np.int64)[:, None] * length
        picked = torch.from_numpy(tokens[starts + np.arange(length + 1)].astype(np.int64))  # [batch, length + 1]
        inputs = (picked[:, :-1].contiguous(),) if wants.inputs else ()
        return Batch(*inputs, target=picked[:, 1:].contiguous() if wants.target else None)


def open_dataset(
    config: RunConfig,
    cache: Path,
    *,
    others: Sequence[Path] = (),
    tell: Tell | None = None,
) -> TokenDataset:
    """Find, tokenize (once, into the cache folder) and cut the text that a configuration names.

    Tokens that one of the `others` holds are taken from there; `tell` is that of `tokenize`.

    Raises:
        ConfigError: a file is missing, unreadable or not UTF-8; there is too little text; the model's vocabulary is
            too small for the tokenizer.
        PenstockError: the cache cannot be written.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    if 0 < config.model.vocabulary < tokenizer.vocabulary:
        raise ConfigError(
            f"{config.model.vocabulary} is smaller than the {tokenizer.vocabulary} ids of tokenizer {data.tokenizer}; "
            "use 0 to take them all",
            key="model.vocabulary",
        )
    documents = find_standard_library() if data.corpus == "stdlib" else find_documents(data.files, data.suffixes)
    found = tokenize(TextFiles(documents), tokenizer, cache, others=others, tell=tell)
    options = WindowOptions(
        config.batch.size, config.batch.length, config.run.seed, data.held_out_fraction, tokenizer.end_of_document
    )
    vocabulary = config.model.vocabulary or tokenizer.vocabulary
    return TokenDataset(found.tokens(), options, vocabulary=vocabulary, digest=found.manifest.digest)


def _from_next_document(tokens: NDArray[np.unsignedinteger], end: int | None) -> NDArray[np.unsignedinteger]:
    """Return the tokens without the rest of a document that begins before them, unless that is half of them."""
    half = len(tokens) // 2 if end is not None else 0
    for first in range(0, half, LOOK_AT_ONCE):
        ends = np.flatnonzero(tokens[first : min(first + LOOK_AT_ONCE, half)] == end)
        if len(ends):
            return tokens[first + int(ends[0]) + 1 :]
    return tokens


def _count_windows(tokens: NDArray[np.unsignedinteger], length: int) -> int:
    # Neighbouring windows share one token: the last target of one is the first input of the next.
    return max(0, (len(tokens) - 1) // length)
