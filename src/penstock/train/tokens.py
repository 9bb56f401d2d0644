"""The tokens of a corpus in one memory-mapped file, made once and reused while its sources stay the same.

The cache folder gets two files per corpus, `<key>.tokens` and `<key>.json` (the manifest). Both appear whole, the
manifest last, and any two writers of a key write the same bytes; so processes may race for them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import ConfigError
from penstock.files import atomic_file, remove_abandoned
from penstock.train.corpus import FILES_KEY, Document, read_document
from penstock.train.tokenizer import Tokenizer

FORMAT_VERSION = 1


class Manifest(BaseModel):
    """What a token file holds, and from what it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    """Hash of the sources' paths, sizes and times, the tokenizer and the format."""
    digest: str
    """Hash of the content alone: equal on two machines that train on the same tokens."""
    vocabulary: int
    item_bytes: int
    num_tokens: int
    num_documents: int
    num_duplicates: int
    """Documents left out because another one has the same content."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file in the cache and its manifest."""

    path: Path
    manifest: Manifest

    def tokens(self) -> NDArray[np.unsignedinteger]:
        """Map the token ids into memory, read-only."""
        return np.memmap(self.path, dtype=_item_type(self.manifest.vocabulary), mode="r")


@dataclass(frozen=True, slots=True)
class _Source:
    digest: str
    path: Path
    size_bytes: int


def tokenize(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    cache: Path,
    *,
    others: Sequence[Path] = (),
    tell: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """Return the token file of these documents, made now unless the cache folder or one of the `others` holds it.

    The documents stand in the order of their content's hash: a fixed order that mixes what lies together in folders and
    does not depend on where the files lie. Equal documents are kept once, so that none is both in the training part and
    in the held-out part. One document at a time is held in memory. `tell` is called after each with the bytes that are
    tokenized and with those of all.

    Raises:
        ConfigError: a document cannot be read or is not UTF-8, the corpus is empty, or the cache cannot be created.
        PenstockError: the cache cannot be written (disk full, say).
    """
    key = _key_of(documents, tokenizer)
    for folder in (cache, *others):
        found = _find_in_cache(folder, key)
        if found is not None:
            return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{cache}: the folder for tokens cannot be created: {error.strerror}. "
            "Choose a run.folder that can be written"
        ) from error
    remove_abandoned(cache, now_s=time.time())
    return _write(documents, tokenizer, cache, key, tell or _tell_nobody)


def _key_of(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    sources = [[str(document.path.absolute()), document.size_bytes, document.modified_ns] for document in documents]
    return hashlib.sha256(json.dumps([FORMAT_VERSION, tokenizer.identity, sources]).encode()).hexdigest()[:32]


def _find_in_cache(cache: Path, key: str) -> TokenFile | None:
    """Return the cached tokens; nothing where they are missing or damaged, so that they are made again."""
    path = cache / f"{key}.tokens"
    try:
        manifest = Manifest.model_validate_json((cache / f"{key}.json").read_bytes())
        size_bytes = path.stat().st_size
    except (OSError, ValidationError):
        return None
    if manifest.key != key or size_bytes != manifest.num_tokens * manifest.item_bytes:
        return None
    return TokenFile(path, manifest)


def _tell_nobody(num_done: int, num_all: int) -> None:
    pass


def _write(
    documents: Sequence[Document], tokenizer: Tokenizer, cache: Path, key: str, tell: Callable[[int, int], None]
) -> TokenFile:
    sources = _distinct(documents)
    num_all = sum(source.size_bytes for source in sources)
    path = cache / f"{key}.tokens"
    item_type = _item_type(tokenizer.vocabulary)
    num_tokens = num_done = 0
    with atomic_file(path) as file:
        for content in _contents(sources):
            tokens = tokenizer.encode_document(content).astype(item_type)
            num_tokens += len(tokens)
            file.write(tokens.tobytes())
            num_done += len(content)
            tell(num_done, num_all)
        if not num_tokens:
            raise ConfigError(
                f"the corpus is empty: its {len(documents)} files hold no text; name files with text", key=FILES_KEY
            )
    manifest = Manifest(
        key=key,
        digest=_digest_of(sources, tokenizer),
        vocabulary=tokenizer.vocabulary,
        item_bytes=item_type.itemsize,
        num_tokens=num_tokens,
        num_documents=len(sources),
        num_duplicates=len(documents) - len(sources),
    )
    with atomic_file(cache / f"{key}.json") as file:
        file.write(manifest.model_dump_json(indent=2).encode())
    return TokenFile(path, manifest)


def _distinct(documents: Sequence[Document]) -> list[_Source]:
    """Return one source per distinct content that is not empty, ordered by the content's hash."""
    by_digest: dict[str, _Source] = {}
    for document in documents:
        content = read_document(document.path)
        if content:
            digest = hashlib.sha256(content).hexdigest()
            by_digest.setdefault(digest, _Source(digest, document.path, len(content)))
    return [by_digest[digest] for digest in sorted(by_digest)]


def _contents(sources: Sequence[_Source]) -> Iterator[bytes]:
    """Read again, so that memory never holds the whole corpus; what changed in between is refused."""
    for source in sources:
        content = read_document(source.path)
        if hashlib.sha256(content).hexdigest() != source.digest:
            raise ConfigError(f"{source.path} changed while it was read; start again", key=FILES_KEY)
        yield content


def _digest_of(sources: Sequence[_Source], tokenizer: Tokenizer) -> str:
    text = json.dumps([FORMAT_VERSION, tokenizer.identity, [source.digest for source in sources]])
    return hashlib.sha256(text.encode()).hexdigest()


def _item_type(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest little-endian unsigned type that holds every id."""
    if vocabulary <= 1 << 8:
        return np.dtype("<u1")
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")
