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
from penstock.train.data.corpus import FILES_KEY, TextFiles, find_documents, find_standard_library
from penstock.train.data.saved_dataset import SavedDataset, id_tokenizer
from penstock.train.data.sequences import Mixture, Source, Span, Spans
from penstock.train.data.tokenizer import Tokenizer, tokenizer_of
from penstock.train.data.tokens import Corpus, Tell, TokenFile, tokenize
from penstock.train.settings.config import RunConfig
from penstock.train.settings.sections import SourceKeys

EVERYTHING = Wants()


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
        self._options = options
        self._mixture = Mixture(weights, seed=options.seed)
        # Refuse text that is too short: for a sequence of one source, or for a batch of all sources.
        for number, source in enumerate(self.sources):
            if not len(source.train):
                raise ConfigError(
                    f"{self._source_name(number)} has {source.num_train_tokens} tokens to train on, but one "
                    f"sequence of batch.length = {options.length} needs {options.length + 1}; name more text, or lower "
                    "batch.length",
                    key=FILES_KEY,
                )
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
        return self._options.packing != "none"

    def batch(self, number: int, wants: Wants = EVERYTHING) -> Batch:
        """Return a batch, counted from 0; any one, in any order, is found in the same time."""
        return self.gather(_replica_rows(self._spans(number), wants), wants)

    def num_targets(self, number: int) -> int:
        """Return how many tokens the loss of a batch is the mean of; no token is read for it."""
        if self.has_even_batches:
            return self.batch_size * self._options.length
        return _num_targets(self._spans(number))

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
        return [self.gather(_replica_rows(spans, wants), wants) for spans in self._held_out_spans(num_batches)]

    def held_out_weights(self, num_batches: int) -> list[float] | None:
        """Return how many targets each of these batches has; None where they have equally many."""
        if self.has_even_batches:
            return None
        return [float(_num_targets(spans)) for spans in self._held_out_spans(num_batches)]

    def _spans(self, number: int) -> list[tuple[Source, Span]]:
        first = number * self.batch_size
        locations = map(self._mixture.locate, range(first, first + self.batch_size))
        return [(self.sources[number], self.sources[number].train_span(sequence)) for number, sequence in locations]

    def _held_out_spans(self, num_batches: int) -> list[list[tuple[Source, Span]]]:
        """Return the held-out sequences of at most `num_batches` batches, in shares of the sources by their weights.

        A sequence is its source and the span of its tokens there. Those of a source are spread evenly over its held-out
        part.

        Raises:
            ConfigError: the held-out part does not fill a batch, or a source that is to give sequences has none.
        """
        batch_size = self.batch_size
        num_available = sum(len(source.held_out) for source in self.sources)
        num_wanted = min(num_batches, num_available // batch_size) * batch_size
        if not num_wanted:
            raise ConfigError(
                f"the held-out part has {num_available} sequences of {self._options.length} tokens, fewer than "
                f"batch.size = {batch_size}; name more text, or raise data.held_out_fraction",
                key="data.held_out_fraction",
            )
        counts = self._mixture.counts(num_wanted)
        for number, (source, count) in enumerate(zip(self.sources, counts, strict=True)):
            if count and not len(source.held_out):
                raise ConfigError(
                    f"the held-out part of {self._source_name(number)} is shorter than one sequence; name more "
                    "text, or raise data.held_out_fraction",
                    key="data.held_out_fraction",
                )
        spans = []
        for sequence in range(num_wanted):
            number, sequence_of_source = self._mixture.locate(sequence)
            source = self.sources[number]
            # Sequence k of the n from a source is the one at the share k / n of its held-out part.
            spans.append((source, source.held_out[sequence_of_source * len(source.held_out) // counts[number]]))
        return [spans[begin : begin + batch_size] for begin in range(0, num_wanted, batch_size)]

    def gather(self, spans: Sequence[tuple[Source, Span]], wants: Wants) -> Batch:
        """Read the tokens of these sequences, one per row, and return the parts of the batch that `wants` names."""
        keywords: dict[str, Any] = {}
        if self._options.packing == "documents":
            positions = np.stack([source.positions(span) for source, span in spans])
            keywords[self._options.positions] = torch.from_numpy(positions)
        if not (wants.inputs or wants.target):
            return Batch(**keywords)
        length = self._options.length
        tokens = np.zeros((len(spans), length + 1), dtype=np.int64)  # inputs and target overlap but for one token
        counts = np.array([end - begin for _, (begin, end) in spans])
        for row, (source, (begin, end)) in zip(tokens, spans, strict=True):
            row[: end - begin] = source.tokens[begin:end]
        inputs = (torch.from_numpy(tokens[:, :-1].copy()),) if wants.inputs else ()
        target = tokens[:, 1:].copy()
        target[np.arange(1, length + 1) >= counts[:, None]] = IGNORED_TARGET
        return Batch(*inputs, target=torch.from_numpy(target) if wants.target else None, **keywords)

    def _source_name(self, number: int) -> str:
        return "the corpus" if len(self.sources) == 1 else f"data.sources[{number}]"


def _num_targets(spans: Sequence[tuple[Source, Span]]) -> int:
    return sum(end - begin - 1 for _, (begin, end) in spans)


def _replica_rows(spans: Sequence[tuple[Source, Span]], wants: Wants) -> Sequence[tuple[Source, Span]]:
    return spans[wants.rows_of(len(spans))]


def whole_text(dataset: TokenDataset, wants: Wants = EVERYTHING) -> tuple[Iterator[Batch], list[float]]:
    """Return batches of every sequence that is not held out, once and in the order of the text, and their targets.

    The last batch may be smaller. A batch is read when it is asked for.
    """
    spans = [(source, source.train) for source in dataset.sources]
    target_counts = [float(_num_targets(batch_spans)) for batch_spans in _cut(spans, dataset.batch_size)]
    return (dataset.gather(batch_spans, wants) for batch_spans in _cut(spans, dataset.batch_size)), target_counts


def _cut(sequences: Sequence[tuple[Source, Spans]], size: int) -> Iterator[list[tuple[Source, Span]]]:
    spans_in_order = ((source, spans[index]) for source, spans in sequences for index in range(len(spans)))
    while batch := list(islice(spans_in_order, size)):
        yield batch


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
    # A source with token ids of its own needs no tokenizer.
    sources, digests = [], []
    for number, corpus in enumerate(corpora):
        has_ids = isinstance(corpus, SavedDataset) and corpus.has_ids
        source_tokenizer = id_tokenizer(vocabulary) if has_ids else tokenizer
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
    return TextFiles(documents)


def _source(config: RunConfig, file: TokenFile, tokenizer: Tokenizer, number: int) -> Source:
    return Source(
        file.tokens(),
        length=config.batch.length,
        held_out_fraction=config.data.held_out_fraction,
        end_of_document=tokenizer.end_of_document,
        document_ends=file.document_ends(),
        by_document=config.data.packing == "none",
        seed=config.run.seed,
        number=number,
    )


def _digest(digests: Sequence[str], weights: Sequence[float]) -> str:
    """Return the digest of the only source, or the hash of all sources' digests and weights."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(json.dumps([list(digests), list(weights)]).encode()).hexdigest()
