"""The tokens of a corpus in one memory-mapped file, made once and reused while its sources stay the same.

The cache folder gets three files per corpus: `<key>.tokens`, `<key>.ends` (per document, the number of tokens up to its
end) and `<key>.json` (the manifest). All appear whole, the manifest last, and any two writers of a key write the same
bytes; so processes may race for them. Documents are read twice, piece by piece: for their hashes, and for their tokens.

A token file in the making is in a folder that one process alone writes to:

    <key>.unfinished/tokens   the ids so far
    <key>.unfinished/ends     per document, the number of tokens up to its end

The folder of a process that was killed is taken over by the next one, which begins again. A file lock tells it from one
that is still written to. Another process that comes meanwhile makes a folder of its own.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.files import ABANDONED_AFTER_S, atomic_file, naming_storage, remove_abandoned
from penstock.train.data.corpus import FILES_KEY, PIECE_BYTES, TextFiles
from penstock.train.data.saved_dataset import SavedDataset
from penstock.train.data.tokenizer import Tokenizer
from penstock.train.settings.section import Section

Corpus = TextFiles | SavedDataset
"""Documents with numbers from 0."""
FORMAT_VERSION = 1
SUFFIX = ".unfinished"
TOKENS, ENDS = "tokens", "ends"
END_TYPE = np.dtype("<i8")


class Manifest(Section):
    """The content of a token file, and from what it was made."""

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

    def document_ends(self) -> NDArray[np.signedinteger]:
        """Map into memory, per document, the number of tokens up to its end; read-only."""
        return np.memmap(_ends_path(self.path), dtype=END_TYPE, mode="r")


@dataclass(slots=True, eq=False)
class UnfinishedTokens:
    """Takes the ids of one document after another."""

    folder: Path
    _tokens: BinaryIO
    _ends: BinaryIO
    num_tokens: int = 0

    def write(self, ids: NDArray[np.unsignedinteger], *, is_last: bool) -> None:
        """Add ids; `is_last` ends the document. Raises: OSError."""
        self._tokens.write(ids.tobytes())
        self.num_tokens += len(ids)
        if is_last:
            self._ends.write(np.array([self.num_tokens], dtype=END_TYPE).tobytes())

    def finish(self, tokens_path: Path, ends_path: Path) -> None:
        """Move both files to their final names, when the disk holds them. Raises: OSError."""
        for file in (self._tokens, self._ends):
            file.flush()
            os.fsync(file.fileno())
        self._set_aside()
        os.replace(self.folder / ENDS, ends_path)
        os.replace(self.folder / TOKENS, tokens_path)
        self.discard()

    def discard(self) -> None:
        """Remove the folder with everything in it."""
        with suppress(OSError):
            self._set_aside()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _set_aside(self) -> None:
        """Give the folder another name first: a process that comes now shall not write into a folder that goes."""
        aside = _new_name(self.folder)
        os.rename(self.folder, aside)
        self.folder = aside


Tell = Callable[[str, int, int], None]
"""Is called with what is done ("reading", "tokenizing"), with how much of it, and with how much there is."""


@dataclass(frozen=True, slots=True)
class _Sources:
    """Documents of a corpus, one of each distinct content that is not empty, in the order of their contents' hashes."""

    digests: NDArray[np.bytes_]
    indices: NDArray[np.signedinteger]
    sizes_bytes: NDArray[np.signedinteger]

    def __len__(self) -> int:
        return len(self.indices)

    def digest(self, number: int) -> str:
        return bytes(self.digests[number]).ljust(hashlib.sha256().digest_size, b"\0").hex()


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: Path,
    *,
    other_caches: Sequence[Path] = (),
    tell: Tell | None = None,
) -> TokenFile:
    """Return the token file of a corpus, made now unless the cache folder or one of `other_caches` holds it.

    The documents are in the order of their content's hash: a fixed order that mixes what lies together in folders and
    does not depend on where the files lie. Equal documents are kept once, so that none is both in the training part and
    in the held-out part. One piece of a document at a time is held in memory. `tell` is called after each piece.

    Raises:
        ConfigError: a document cannot be read or is not UTF-8, the corpus is empty, or the cache cannot be created.
        PenstockError: the cache cannot be written (disk full, say).
    """
    parts = json.dumps([FORMAT_VERSION, tokenizer.identity, corpus.stamp()])
    key = hashlib.sha256(parts.encode()).hexdigest()[:32]
    for folder in (cache, *other_caches):
        token_file = _token_file_in(folder, key)
        if token_file is not None:
            return token_file
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{cache}: the folder for tokens cannot be created: {error.strerror}. "
            "Choose a run.folder that can be written"
        ) from error
    remove_abandoned(cache, now_s=time.time())
    return _tokenize_into_cache(corpus, tokenizer, cache, key, tell or (lambda activity, num_done, num_all: None))


def _token_file_in(cache: Path, key: str) -> TokenFile | None:
    """Return the cached tokens; nothing where they are missing or damaged, so that they are made again."""
    path = cache / f"{key}.tokens"
    try:
        manifest = Manifest.model_validate_json((cache / f"{key}.json").read_bytes())
        size_bytes, ends_bytes = path.stat().st_size, _ends_path(path).stat().st_size
    except (OSError, ValidationError):
        return None
    if manifest.key != key or size_bytes != manifest.num_tokens * manifest.item_bytes:
        return None
    if ends_bytes != manifest.num_documents * END_TYPE.itemsize:
        return None
    return TokenFile(path, manifest)


def _tokenize_into_cache(corpus: Corpus, tokenizer: Tokenizer, cache: Path, key: str, tell: Tell) -> TokenFile:
    """Tokenize a corpus into a file in the cache folder, under the name `key`; return the file.

    Tokens are written under another name first, and the manifest last, so that a file with a manifest is whole. Equal
    documents are kept once.

    Raises:
        ConfigError: the corpus has no text or no tokens, or a document cannot be read.
    """
    sources = _distinct_documents(corpus, tell)
    if not len(sources):
        raise ConfigError(
            f"the corpus is empty: its {len(corpus)} files hold no text; name files with text", key=FILES_KEY
        )
    path = cache / f"{key}.tokens"
    item_type = _item_type(tokenizer.vocabulary)
    with unfinished_tokens(cache, key) as writer:
        _write_tokens(corpus, sources, tokenizer, writer, tell)
        if not writer.num_tokens:
            raise ConfigError(
                f"the corpus is empty: its {len(corpus)} files have no tokens; name files with text", key=FILES_KEY
            )
        writer.finish(path, _ends_path(path))
    manifest = Manifest(
        key=key,
        digest=_digest_of(sources, tokenizer),
        vocabulary=tokenizer.vocabulary,
        item_bytes=item_type.itemsize,
        num_tokens=writer.num_tokens,
        num_documents=len(sources),
        num_duplicates=len(corpus) - len(sources),
    )
    with atomic_file(cache / f"{key}.json") as file:
        file.write(manifest.model_dump_json(indent=2).encode())
    return TokenFile(path, manifest)


def _distinct_documents(corpus: Corpus, tell: Tell) -> _Sources:
    """Read every document for its hash, and return one document of each content."""
    digests, sizes, num_read = [], np.zeros(len(corpus), dtype=np.int64), 0
    for index in range(len(corpus)):
        content = hashlib.sha256()
        for piece in corpus.pieces(index):
            content.update(piece)
            sizes[index] += len(piece)
            num_read += len(piece)
            tell("reading", num_read, corpus.num_bytes)
        digests.append(content.digest())
    # An array needs a fifth of what objects do. It drops zero bytes at the end of an item, which changes no order.
    unique, firsts = np.unique(np.array(digests, dtype="S32"), return_index=True)
    is_kept = sizes[firsts] > 0
    return _Sources(unique[is_kept], firsts[is_kept], sizes[firsts[is_kept]])


def _write_tokens(
    corpus: Corpus, sources: _Sources, tokenizer: Tokenizer, writer: UnfinishedTokens, tell: Tell
) -> None:
    """Read the documents again, piece by piece, and write their tokens. Raises: ConfigError, if one has changed."""
    item_type = _item_type(tokenizer.vocabulary)
    num_all = int(sources.sizes_bytes.sum())
    num_done = 0
    for number in range(len(sources)):
        index = int(sources.indices[number])
        size = int(sources.sizes_bytes[number])
        content, offset = hashlib.sha256(), 0
        for piece in corpus.pieces(index):
            content.update(piece)
            begin, offset = offset, offset + len(piece)
            is_last = offset == size
            if offset > size or (is_last and content.hexdigest() != sources.digest(number)):
                raise _changed(corpus.name(index))
            ids = tokenizer.encode_piece(piece, is_first=begin == 0, is_last=is_last).astype(item_type)
            writer.write(ids, is_last=is_last)
            num_done += len(piece)
            tell("tokenizing", num_done, num_all)
        if offset != size:
            raise _changed(corpus.name(index))


def _changed(name: str) -> ConfigError:
    return ConfigError(f"{name} changed while it was read; start again", key=FILES_KEY)


def _digest_of(sources: _Sources, tokenizer: Tokenizer) -> str:
    """Return the hash of the JSON list of format, tokenizer and the documents' hashes, which is not made as a whole."""
    identity = tokenizer.identity
    if tokenizer.depends_on_pieces and (sources.sizes_bytes >= PIECE_BYTES).any():
        identity += f" in pieces of {PIECE_BYTES}"
    digest = hashlib.sha256(f"[{FORMAT_VERSION}, {json.dumps(identity)}, [".encode())
    for number in range(len(sources)):
        digest.update(f'{", " if number else ""}"{sources.digest(number)}"'.encode())
    digest.update(b"]]")
    return digest.hexdigest()


def _ends_path(path: Path) -> Path:
    return path.with_suffix(".ends")


def _item_type(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest little-endian unsigned type that holds every id."""
    if vocabulary <= 1 << 8:
        return np.dtype("<u1")
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


@contextmanager
def unfinished_tokens(cache: Path, key: str) -> Iterator[UnfinishedTokens]:
    """Write the tokens of a key from the first one on; an error or an interruption removes them.

    Raises:
        PenstockError: no space, no permission, or another storage failure.
    """
    with naming_storage(cache):
        _remove_abandoned(cache, key, now_s=time.time())
        folder, tokens_file = _open_private_folder(cache, key)
    with naming_storage(folder), tokens_file, (folder / ENDS).open("wb") as ends_file:
        tokens_file.truncate(0)
        writer = UnfinishedTokens(folder, tokens_file, ends_file)
        try:
            yield writer
        except BaseException:
            writer.discard()
            raise


def _open_private_folder(cache: Path, key: str) -> tuple[Path, BinaryIO]:
    """Return a folder that this process alone writes to, and its file of tokens, locked."""
    shared_folder = cache / f"{key}{SUFFIX}"
    # Another process may just have finished, and taken the folder away.
    with suppress(FileNotFoundError, FileExistsError):
        shared_folder.mkdir(exist_ok=True)
        file = (shared_folder / TOKENS).open("ab")
        if _lock(file, shared_folder / TOKENS):
            return shared_folder, file
        file.close()
    private_folder = _new_name(shared_folder)
    private_folder.mkdir()
    return private_folder, (private_folder / TOKENS).open("ab")


def _lock(file: BinaryIO, path: Path) -> bool:
    """Return whether this process alone writes to the file; a file system without locks cannot say so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _remove_abandoned(cache: Path, key: str, *, now_s: float) -> None:
    """Remove what is left of other keys, and of writers that had a folder of their own, after an hour."""
    for folder in cache.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            is_old = now_s - (folder / TOKENS).stat().st_mtime > ABANDONED_AFTER_S
            if is_old and folder.name != f"{key}{SUFFIX}":
                shutil.rmtree(folder, ignore_errors=True)


def _new_name(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.split('.')[0]}.{uuid4().hex}{SUFFIX}")
