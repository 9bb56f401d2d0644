"""Bytes and tokenizer files."""

import sys

import pytest
import tokenizers

from penstock.errors import ConfigError
from penstock.train.tokenizer import load_tokenizer


def save_tokenizer(path):
    """Three words, with a gap in the ids."""
    words = {"[UNK]": 0, "red": 1, "blue": 70_000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


def test_bytes_are_their_own_ids_and_a_document_ends_with_zero():
    tokenizer = load_tokenizer("bytes")

    assert tokenizer.encode("né".encode()).tolist() == [110, 195, 169]
    assert tokenizer.encode_document("né".encode()).tolist() == [110, 195, 169, 0]
    assert tokenizer.decode([110, 195, 169]) == "né"
    assert tokenizer.vocabulary == 256


def test_a_tokenizer_file_gives_its_ids_and_room_for_the_largest(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "words.json"))

    assert tokenizer.encode(b"blue red green").tolist() == [70_000, 1, 0]
    assert tokenizer.encode_document(b"blue").tolist() == [70_000]
    assert tokenizer.decode([70_000, 1]) == "blue red"
    assert tokenizer.vocabulary == 70_001


def test_identity_follows_the_content_of_the_file(tmp_path):
    first, second = (save_tokenizer(tmp_path / name) for name in ("a.json", "b.json"))

    assert load_tokenizer(first).identity == load_tokenizer(second).identity != load_tokenizer("bytes").identity


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"{}", "is not a tokenizers JSON"),
        (b"\xff", "is not a tokenizers JSON"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, message):
    path = tmp_path / "words.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(str(path))

    assert caught.value.key == "data.tokenizer"


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    path = save_tokenizer(tmp_path / "words.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ConfigError, match=r"pip install '\.\[tokenizers\]' in Penstock's clone"):
        load_tokenizer(path)
