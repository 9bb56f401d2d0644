"""The keys of `[data]`, and two tables: what each corpus is read from, and what each packing makes of its documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.train.settings.section import NotNegative, Section, Texts

CHATS = "chats"


@dataclass(frozen=True, slots=True)
class CorpusKind:
    """What a corpus is read from."""

    most_files: int | None = None
    """Files and folders that `files` names at most; None: any number."""
    column: str = ""
    """Default of the key `column`; empty where documents have no columns."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Default of the key `suffixes`."""
    learn: str = "all"
    """Default of the key `learn`."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The values of keys that a run file does not set beside the corpus."""
        keys = {"suffixes": self.suffixes, "learn": self.learn}
        return keys | ({"column": self.column} if self.column else {})


CORPORA: Mapping[str, CorpusKind] = MappingProxyType(
    {
        "files": CorpusKind(),
        "stdlib": CorpusKind(most_files=0),
        "datasets": CorpusKind(most_files=1, column="text"),
        CHATS: CorpusKind(column="messages", suffixes=(".jsonl", ".parquet"), learn="assistant"),
    }
)
"""A corpus has a row here, a name in `SourceKeys.corpus`, and a reader in `train/data/dataset.py`."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a packing makes of documents."""

    cuts: bool = field(kw_only=True)
    """Whether a sequence begins or ends within documents."""
    separates: bool = field(default=False, kw_only=True)
    """Whether a sequence has several documents, which do not see each other."""
    pads: bool = field(default=False, kw_only=True)
    """Whether sequences are filled up, so that they have different numbers of targets."""


PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "windows": Packing(cuts=True),
        "documents": Packing(cuts=True, separates=True),
        "none": Packing(cuts=False, pads=True),
        "whole": Packing(cuts=False, separates=True, pads=True),
    }
)


class SourceKeys(Section):
    """Where text is found."""

    corpus: Literal["files", "stdlib", "datasets", "chats"] = "files"
    """'files': data.files; 'stdlib': the sources of the running Python's standard library; 'datasets': the folder in
    data.files, which the datasets package has saved (needs the extra `datasets`); 'chats': the conversations in
    data.files, as JSONL or Parquet (needs the extra `transformers`)"""
    files: Texts = ()
    """UTF-8 text files, or folders to search; relative to the current folder"""
    suffixes: Texts = CORPORA["files"].suffixes
    """endings of the files taken from folders; with 'chats', by default '.jsonl' and '.parquet'"""
    column: str = Field(default="text", min_length=1)
    """with 'datasets', the column of texts, or of token ids such as 'input_ids'; each row is a document. With 'chats',
    the column of messages, by default 'messages'"""
    learn: Literal["all", "assistant"] = "all"
    """which tokens are targets: 'all', or with 'chats' those of the 'assistant', which is the default there"""

    @model_validator(mode="before")
    @classmethod
    def _take_the_defaults_of_the_corpus(cls, table: Any) -> Any:
        kind = CORPORA.get(str(table.get("corpus"))) if isinstance(table, dict) else None
        return table if kind is None else kind.defaults | table

    @property
    def kind(self) -> CorpusKind:
        """What the corpus is read from."""
        return CORPORA[self.corpus]


class SourceSection(SourceKeys):
    """One of several sources of text."""

    weight: float = Field(default=1.0, gt=0)
    """share of the sequences, relative to the other sources"""


class DataSection(SourceKeys):
    """The text and its tokens."""

    sources: Annotated[tuple[SourceSection, ...], Field(strict=False)] = ()
    """several sources in place of data.files: tables with corpus, files, suffixes, column, learn and weight, their
    share"""
    source: str = ""
    """FILE.py:FUNCTION in place of text: a function of yours, called with those of config, batch_size, length, seed and
    split that it names; it returns an iterable of batches (tokens, target)"""
    packing: Literal["windows", "documents", "none", "whole"] = "windows"
    """what a sequence is. 'windows': the next batch.length tokens, whatever documents they are of; 'documents': the
    same, but no token attends to another document, and positions begin anew with each; 'none': a document, cut to
    batch.length or filled up with padding, which no loss counts; 'whole', the default with 'chats': as many whole
    documents as fit, which do not attend to each other, then padding; longer ones are left out"""
    tokenizer: str = Field(default="bytes", min_length=1)
    """'bytes', or the path of a tokenizers JSON file"""
    tokenizer_digest: str = ""
    """of the file of data.tokenizer; a run fills it in"""
    chat_template: str = ""
    """with 'chats', a file with a Jinja template; empty: that beside data.tokenizer"""
    end_of_document: str = ""
    """token that ends a document, such as '<|endoftext|>'; empty: one of the usual names that the tokenizer has, if
    any; bytes end with a zero byte"""
    held_out_fraction: float = Field(default=0.05, ge=0, lt=1)
    """share of the tokens kept for evaluation only"""
    prefetch: NotNegative = 2
    """batches that a thread prepares while a step runs; 0: each is read when it is needed"""

    @model_validator(mode="after")
    def _pack_chats_whole(self) -> Self:
        if self.has_chats and "packing" not in self.model_fields_set:
            object.__setattr__(self, "packing", "whole")
        return self

    @property
    def all_sources(self) -> tuple[SourceSection, ...]:
        """The sources, or the one that this section names itself."""
        direct_keys = {name: getattr(self, name) for name in SourceKeys.model_fields}
        return self.sources or (SourceSection(**direct_keys),)

    @property
    def has_chats(self) -> bool:
        """Whether a source is of conversations."""
        return any(source.corpus == CHATS for source in self.sources or (self,))

    @property
    def packs(self) -> Packing:
        """What the packing makes of documents."""
        return PACKINGS[self.packing]
