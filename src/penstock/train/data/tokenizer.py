"""Turning text into token ids and back: as bytes, or through a `tokenizers` file."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.train.settings.config import RunConfig

TOKENIZER_KEY = "data.tokenizer"
END_OF_DOCUMENT = 0
"""The byte that ends a document: text hardly ever has a zero byte, so it can tell the model where one ends."""


PROBE = b"a"
"""A text by whose ids a tokenizer shows which ids it adds to every text."""
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""The names of the end of a document in tokenizer files: of GPT-2, Llama 3, Llama 2, Gemma and others."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A way from UTF-8 bytes to token ids in `range(vocabulary)`, and back to text."""

    identity: str
    """A text that is equal for two tokenizers only if they give equal ids for every text."""
    vocabulary: int
    encode: Callable[[bytes], NDArray[np.uint32]]
    decode: Callable[[Sequence[int]], str]
    end_of_document: int | None
    """The id behind the last one of a document; None where there is none."""
    encode_part: Callable[[bytes], NDArray[np.uint32]] | None = None
    """`encode` without the ids that it adds to a text; None where it adds none."""
    added_ids: tuple[Sequence[int], Sequence[int]] = ((), ())
    """The ids that `encode` adds before and behind a text."""
    depends_on_pieces: bool = False
    """Whether a text in two pieces may give other ids than the whole one."""

    def encode_piece(self, content: bytes, *, is_first: bool, is_last: bool) -> NDArray[np.uint32]:
        """Return the ids of one piece of a document, with the document's end behind the last one."""
        if is_first and is_last:
            ids = self.encode(content)
        else:
            prefix_ids, suffix_ids = self.added_ids
            inner = (self.encode_part or self.encode)(content)
            parts = [prefix_ids if is_first else (), inner, suffix_ids if is_last else ()]
            ids = np.concatenate([np.asarray(part, dtype=np.uint32) for part in parts])
        if not is_last or self.end_of_document is None:
            return ids
        return np.append(ids, np.uint32(self.end_of_document))


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a run.

    Raises:
        ConfigError: as `load_tokenizer` does, or the file is another one than that which the run began with.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    digest = tokenizer_digest(data.tokenizer)
    if data.tokenizer_digest not in ("", digest):
        raise ConfigError(
            f"{describe_change(data.tokenizer, digest, data.tokenizer_digest)}. Put the file back; for a new run, "
            "remove data.tokenizer_digest",
            key=TOKENIZER_KEY,
        )
    return tokenizer


def tokenizer_digest(name: str) -> str:
    """Return the digest of a tokenizer file; empty for bytes, and for a file that cannot be read."""
    try:
        return "" if name == "bytes" else hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return ""  # `load_tokenizer` says why


def describe_change(name: str, digest: str, expected: str) -> str:
    """Say that a tokenizer file is another one than a run began with."""
    return f"{name} has changed since the run began: its sha256 begins with {digest[:12]}, expected {expected[:12]}"


def load_tokenizer(name: str, end_of_document: str = "") -> Tokenizer:
    """Return the byte tokenizer for `"bytes"`, else the one in the `tokenizers` JSON file of that path.

    `end_of_document` is the token that ends a document in such a file; where it is empty, the first of `END_TOKENS`
    that the file has, if it has any.

    Raises:
        ConfigError: the file cannot be read or is no tokenizer, has no such token, or the `tokenizers` package is
            missing.
    """
    if name == "bytes":
        return Tokenizer("bytes", 256, _encode_bytes, _decode_bytes, END_OF_DOCUMENT)
    try:
        content = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{name}: cannot be read: {reason}. Give 'bytes' or the path of a tokenizers JSON file", key=TOKENIZER_KEY
        ) from error
    return _parse_tokenizer(name, content, end_of_document)


def _encode_bytes(content: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(content, dtype=np.uint8).astype(np.uint32)


def _decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def _parse_tokenizer(name: str, content: bytes, end_of_document: str) -> Tokenizer:
    """Return the tokenizer that a file in the format of the tokenizers package holds.

    `name` is the file's name for messages, and `content` its bytes. `end_of_document` names the token between
    documents; where it is empty, a usual one is taken, if the file has any.

    Raises:
        ConfigError: the package is missing, or the file is none, is empty, or lacks the token.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f"{name} needs the tokenizers package: pip install '.[tokenizers]' in Penstock's clone, or use 'bytes'",
            key=TOKENIZER_KEY,
        ) from error
    try:
        parsed = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    # The package raises bare Exceptions.
    except Exception as error:
        raise ConfigError(f"{name} is not a tokenizers JSON file: {error}", key=TOKENIZER_KEY) from error
    # Ids may have gaps, so the largest counts, not the number of words.
    ids_by_token: dict[str, int] = parsed.get_vocab(with_added_tokens=True)
    vocabulary = max(ids_by_token.values(), default=-1) + 1
    if end_of_document and end_of_document not in ids_by_token:
        raise ConfigError(
            f"{name} has no token {end_of_document!r}; name one that it has, or leave it empty",
            key="data.end_of_document",
        )
    end = next((ids_by_token[token] for token in (end_of_document, *END_TOKENS) if token in ids_by_token), None)
    if not vocabulary:
        raise ConfigError(f"{name} has an empty vocabulary; train the tokenizer first", key=TOKENIZER_KEY)

    def encode(content: bytes, *, adds: bool = True) -> NDArray[np.uint32]:
        return np.array(parsed.encode(content.decode("utf-8"), add_special_tokens=adds).ids, dtype=np.uint32)

    def decode(ids: Sequence[int]) -> str:
        return str(parsed.decode(list(ids)))

    # Equal identities mean equal token ids. A part of a text is encoded without the tokens that the file adds to a
    # text; a probe shows which these are.
    identity = hashlib.sha256(content).hexdigest() + ("" if end is None else f" {end}")
    encode_part = partial(encode, adds=False)
    added_ids = _added_ids(encode(PROBE), encode_part(PROBE))
    return Tokenizer(identity, vocabulary, encode, decode, end, encode_part, added_ids, depends_on_pieces=True)


def _added_ids(ids: NDArray[np.uint32], plain_ids: NDArray[np.uint32]) -> tuple[list[int], list[int]]:
    """Return the ids before and behind `plain_ids` in `ids`; none where these do not hold `plain_ids` in one piece."""
    for begin in range(len(ids) - len(plain_ids) + 1):
        end = begin + len(plain_ids)
        if np.array_equal(ids[begin:end], plain_ids):
            return ids[:begin].tolist(), ids[end:].tolist()
    return [], []
