"""Batches of a run's text: shuffled by seed, the same on every rank, found by number in constant time.

Tokens and target are int64 [batch, length]: sequences per batch, tokens per sequence. The target is the token that
follows; behind the end of a sequence it is -100, which no loss counts. With document masks, `positions` [batch, length]
counts from 0 at the begin of each document; a model of transformers calls it `position_ids`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.models.decoder import IGNORED_TARGET
from penstock.train.data.batches import Batch, Wants
from penstock.train.data.chat_files import ASSISTANT, ChatFiles
from penstock.train.data.chat_template import chat_tokenizer
from penstock.train.data.corpus import FILES_KEY, TextFiles, find_documents, find_standard_library
from penstock.train.data.saved_dataset import SavedDataset, id_tokenizer
from penstock.train.data.sequences import Mixture, Row, Source
from penstock.train.data.tokenizer import Tokenizer, tokenizer_of
from penstock.train.data.tokens import Corpus, Tell, TokenFile, tokenize
from penstock.train.settings.config import RunConfig
from penstock.train.settings.data_section import CHATS, PACKINGS, SourceKeys

EVERYTHING = Wants()
SourceRow = tuple[Source, Row]
"""A sequence: where its tokens are, and which."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The settings by which sequences are put together to batches."""

    batch_size: int
    """Sequences per batch."""
    length: int
    """Tokens per sequence."""
    seed: int = 0
    packing: str = "windows"
    """The value of `data.packing`."""
    positions: str = "positions"
    """The name of the model's keyword argument that takes positions."""


class TokenDataset:
    """Batches over one or several sources of text."""

    def __init__(
        self,
        sources: Sequence[Source],
        options: BatchOptions,
        *,
        weights: Sequence[float] = (1.0,),
        vocabulary: int = 256,
        digest: str = "",
    ) -> None:
        """Draw sequences from sources of tokens, in shares by `weights`; a batch has `options.batch_size` of them.

        `vocabulary` is the number of token ids, and `digest` identifies the text, so that a run can refuse another one.

        Raises:
            ConfigError: a source has nothing to train on, or all of them do not fill a batch.
        """
        # Where sequences come from, and how often each source is drawn from.
        self.sources = list(sources)
        self.vocabulary = vocabulary
        self.digest = digest
        self.batch_size = options.batch_size
        self.options = options
        self._packs = PACKINGS[options.packing]
        self._mixture = Mixture(weights, seed=options.seed)
        # Refuse text that is too short: for a sequence of one source, or for a batch of all sources.
        for number, source in enumerate(self.sources):
            if not len(source.train):
                raise ConfigError(f"{self.source_name(number)} {_shortage(source, options)}", key=FILES_KEY)
        if self.num_sequences < options.batch_size:
            raise ConfigError(
                f"the corpus has {self.num_sequences} sequences to train on, fewer than batch.size = "
                f"{options.batch_size}, so that a batch would have some of them twice; name more text, or lower "
                "batch.size or batch.length",
                key=FILES_KEY,
            )

    @property
    def num_sequences(self) -> int:
        """Sequences to train on; an epoch of each source visits each of its own once."""
        return sum(len(source.train) for source in self.sources)

    @property
    def num_train_tokens(self) -> int:
        """The tokens to train on, of all sources."""
        return sum(source.num_train_tokens for source in self.sources)

    @property
    def has_even_batches(self) -> bool:
        """Whether all batches have as many targets."""
        return not self._packs.pads

    def batch(self, number: int, wants: Wants = EVERYTHING) -> Batch:
        """Return a batch, counted from 0; any one, in any order, is found in the same time."""
        return self.gather(_replica_rows(self._rows(number), wants), wants)

    def num_targets(self, number: int) -> int:
        """Return how many tokens the loss of a batch is the mean of; only marked tokens are read for it."""
        if self.has_even_batches:
            return self.batch_size * self.options.length
        return _num_targets(self._rows(number))

    def shares(self, first: int, count: int) -> list[float] | None:
        """Return the part of each batch in the mean over the tokens of some batches; None where these are equal."""
        if self.has_even_batches:
            return None
        target_counts = [self.num_targets(number) for number in range(first, first + count)]
        return [num_targets / sum(target_counts) for num_targets in target_counts]

    def held_out_batches(self, num_batches: int, wants: Wants = EVERYTHING) -> list[Batch]:
        """Return batches spread evenly over what is held out: always the same, fewer where it does not suffice.

        Several sources have shares by their weights; one that does not suffice for its share is repeated.

        Raises:
            ConfigError: the held-out sequences do not fill one batch, or a source has none.
        """
        return [self.gather(_replica_rows(rows, wants), wants) for rows in self._held_out_rows(num_batches)]

    def held_out_weights(self, num_batches: int) -> list[float] | None:
        """Return how many targets each of these batches has; None where they have equally many."""
        if self.has_even_batches:
            return None
        return [float(_num_targets(rows)) for rows in self._held_out_rows(num_batches)]

    def _rows(self, number: int) -> list[SourceRow]:
        first = number * self.batch_size
        locations = map(self._mixture.locate, range(first, first + self.batch_size))
        return [(self.sources[number], self.sources[number].train_row(sequence)) for number, sequence in locations]

    def _held_out_rows(self, num_batches: int) -> list[list[SourceRow]]:
        """Return the held-out sequences of at most `num_batches` batches, in shares of the sources by their weights.

        Those of a source are spread evenly over its held-out part.

        Raises:
            ConfigError: the held-out part does not fill a batch, or a source that is to give sequences has none.
        """
        batch_size = self.batch_size
        num_available = sum(len(source.held_out) for source in self.sources)
        num_wanted = min(num_batches, num_available // batch_size) * batch_size
        if not num_wanted:
            raise ConfigError(
                f"the held-out part has {num_available} sequences of {self.options.length} tokens, fewer than "
                f"batch.size = {batch_size}; name more text, or raise data.held_out_fraction",
                key="data.held_out_fraction",
            )
        counts = self._mixture.counts(num_wanted)
        for number, (source, count) in enumerate(zip(self.sources, counts, strict=True)):
            if count and not len(source.held_out):
                raise ConfigError(
                    f"the held-out part of {self.source_name(number)} is shorter than one sequence; name more "
                    "text, or raise data.held_out_fraction",
                    key="data.held_out_fraction",
                )
        rows = []
        for sequence in range(num_wanted):
            number, sequence_of_source = self._mixture.locate(sequence)
            source = self.sources[number]
            # Sequence k of the n from a source is the one at the share k / n of its held-out part.
            rows.append((source, source.held_out[sequence_of_source * len(source.held_out) // counts[number]]))
        return [rows[begin : begin + batch_size] for begin in range(0, num_wanted, batch_size)]

    def gather(self, rows: Sequence[SourceRow], wants: Wants) -> Batch:
        """Read the tokens of these sequences, one per row, and return the parts of the batch that `wants` names."""
        keywords: dict[str, Any] = {}
        length = self.options.length
        if self._packs.separates:
            positions = np.stack([source.positions(row, length) for source, row in rows])
            keywords[self.options.positions] = torch.from_numpy(positions)
        if not (wants.inputs or wants.target):
            return Batch(**keywords)
        inputs = np.zeros((len(rows), length), dtype=np.int64)
        target = np.full_like(inputs, IGNORED_TARGET)
        for (source, row), row_inputs, row_target in zip(rows, inputs, target, strict=True):
            source.read(row, row_inputs, row_target)
        parts = (torch.from_numpy(inputs),) if wants.inputs else ()
        return Batch(*parts, target=torch.from_numpy(target) if wants.target else None, **keywords)

    def source_name(self, number: int) -> str:
        """Return what a source is called in messages."""
        return "the corpus" if len(self.sources) == 1 else f"data.sources[{number}]"


def left_out_notes(dataset: TokenDataset) -> list[str]:
    """Return a line for each source of which documents are left out."""
    return [
        f"note: {source.num_left_out} of {len(source.document_ends)} documents of {dataset.source_name(number)} are "
        f"left out, {_why_left_out(dataset.options)}"
        for number, source in enumerate(dataset.sources)
        if source.num_left_out and source.document_ends is not None
    ]


def _shortage(source: Source, options: BatchOptions) -> str:
    """Say why a source has no sequence to train on."""
    if source.num_left_out:
        return f"has only documents that are left out, {_why_left_out(options)}; raise batch.length"
    return (
        f"has {source.num_train_tokens} tokens to train on, but one sequence of batch.length = {options.length} needs "
        f"{options.length + 1}; name more text, or lower batch.length"
    )


def _why_left_out(options: BatchOptions) -> str:
    longest = f"batch.length = {options.length} tokens"
    if PACKINGS[options.packing].separates:
        return f"for they are longer than {longest}"
    return f"for their first {longest} have no target"


def _num_targets(rows: Sequence[SourceRow]) -> int:
    return sum(source.num_targets(row) for source, row in rows)


def _replica_rows(rows: Sequence[SourceRow], wants: Wants) -> Sequence[SourceRow]:
    return rows[wants.rows_of(len(rows))]


def whole_text(dataset: TokenDataset, wants: Wants = EVERYTHING) -> tuple[Iterator[Batch], list[float]]:
    """Return batches of every sequence that is not held out, once and in the order of the text, and their targets.

    The last batch may be smaller. A batch is read when it is asked for.
    """
    target_counts = [float(_num_targets(rows)) for rows in _cut(dataset)]
    return (dataset.gather(rows, wants) for rows in _cut(dataset)), target_counts


def _cut(dataset: TokenDataset) -> Iterator[list[SourceRow]]:
    rows_in_order = (
        (source, row) for source in dataset.sources for row in map(source.train.__getitem__, range(len(source.train)))
    )
    while rows := list(islice(rows_in_order, dataset.batch_size)):
        yield rows


def open_dataset(
    config: RunConfig,
    cache: Path,
    *,
    other_caches: Sequence[Path] = (),
    tell: Tell | None = None,
    may_be_small: bool = False,
) -> TokenDataset:
    """Find, tokenize (once, into the cache folder) and cut the text that a configuration names.

    Tokens that one of `other_caches` holds are taken from there. `tell` is called as tokenizing goes on, with the
    numbers of pieces that are done and in all. Text that `may_be_small` is only evaluated: its batches are as large as
    it allows.

    Raises:
        ConfigError: a file is missing, unreadable or not UTF-8; there is too little text; the model's vocabulary is
            too small for the tokenizer.
        PenstockError: the cache cannot be written.
    """
    data = config.data
    tokenizer = tokenizer_of(config)
    if 0 < config.model.vocabulary < tokenizer.vocabulary:
        raise ConfigError(
            f"{config.model.vocabulary} is smaller than the {tokenizer.vocabulary} ids of tokenizer {data.tokenizer}; "
            "use 0 to take them all",
            key="model.vocabulary",
        )
    vocabulary = config.model.vocabulary or tokenizer.vocabulary
    corpora = [_open_corpus(keys) for keys in data.all_sources]
    sources, digests = [], []
    for number, (keys, corpus) in enumerate(zip(data.all_sources, corpora, strict=True)):
        source_tokenizer = tokenizer
        if keys.corpus == CHATS:
            source_tokenizer = chat_tokenizer(config, keys.learn)
        elif isinstance(corpus, SavedDataset) and corpus.has_ids:
            source_tokenizer = id_tokenizer(vocabulary)
        token_file = tokenize(corpus, source_tokenizer, cache, other_caches=other_caches, tell=tell)
        sources.append(_source(config, token_file, source_tokenizer, number))
        digests.append(token_file.manifest.digest)
    weights = [keys.weight for keys in data.all_sources]
    num_sequences = sum(len(source.train) for source in sources)
    size = min(config.batch.size, max(num_sequences, 1)) if may_be_small else config.batch.size
    positions = "position_ids" if config.model.transformers else "positions"
    return TokenDataset(
        sources,
        BatchOptions(size, config.batch.length, config.run.seed, data.packing, positions),
        weights=weights,
        vocabulary=vocabulary,
        digest=_digest(digests, weights),
    )


def _open_corpus(keys: SourceKeys) -> Corpus:
    if keys.corpus == "datasets":
        return SavedDataset(keys.files[0], keys.column)
    documents = find_standard_library() if keys.corpus == "stdlib" else find_documents(keys.files, keys.suffixes)
    if keys.corpus == CHATS:
        return ChatFiles(documents, keys.column, needs_assistant=keys.learn == ASSISTANT)
    return TextFiles(documents)


def _source(config: RunConfig, file: TokenFile, tokenizer: Tokenizer, number: int) -> Source:
    return Source(
        file.tokens(),
        length=config.batch.length,
        held_out_fraction=config.data.held_out_fraction,
        end_of_document=tokenizer.end_of_document,
        document_ends=file.document_ends(),
        packing=config.data.packing,
        has_marks=config.data.all_sources[number].corpus == CHATS,
        seed=config.run.seed,
        number=number,
    )


def _digest(digests: Sequence[str], weights: Sequence[float]) -> str:
    """Return the digest of the only source, or the hash of all sources' digests and weights."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(json.dumps([list(digests), list(weights)]).encode()).hexdigest()
