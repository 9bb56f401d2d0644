"""Bytes and tokenizer files."""

import sys
from pathlib import Path

import pytest
import tokenizers

from penstock.errors import ConfigError
from penstock.train.data.tokenizer import load_tokenizer, tokenizer_digest, tokenizer_of
from tests.train.settings.tables import config_with, refusal_of, table_with
from tests.train.tiny_runs import save_tokenizer

SPECIAL = [("red", 1), ("green", 0)]


def saved_words(path, end=None):
    """Three words, with a gap in the ids, and perhaps one that ends a document."""
    words = {"[UNK]": 0, "red": 1, "blue": 70_000} | ({} if end is None else {end: 2})
    return save_tokenizer(path, words, unknown="[UNK]")


def test_a_document_in_pieces_gets_what_a_tokenizer_adds_once(tmp_path):
    path = saved_words(tmp_path / "words.json", end="</s>")
    parsed = tokenizers.Tokenizer.from_file(path)
    parsed.post_processor = tokenizers.processors.TemplateProcessing(single="red $A green", special_tokens=SPECIAL)
    parsed.save(path)
    tokenizer = load_tokenizer(path)

    pieces = [b"blue red ", b"blue ", b"blue"]
    found = [tokenizer.encode_piece(piece, is_first=not at, is_last=at == 2) for at, piece in enumerate(pieces)]
    whole = tokenizer.encode_piece(b"".join(pieces), is_first=True, is_last=True)

    assert [each.tolist() for each in found] == [[1, 70_000, 1], [70_000], [70_000, 0, 2]]
    assert whole.tolist() == [1, 70_000, 1, 70_000, 70_000, 0, 2]


def test_bytes_are_their_own_ids_and_a_document_ends_with_zero():
    tokenizer = load_tokenizer("bytes")

    assert tokenizer.encode("né".encode()).tolist() == [110, 195, 169]
    assert tokenizer.encode_piece("né".encode(), is_first=True, is_last=True).tolist() == [110, 195, 169, 0]
    assert tokenizer.decode([110, 195, 169]) == "né"
    assert tokenizer.vocabulary == 256


def test_a_tokenizer_file_gives_its_ids_and_room_for_the_largest(tmp_path):
    tokenizer = load_tokenizer(saved_words(tmp_path / "words.json"))

    assert tokenizer.encode(b"blue red green").tolist() == [70_000, 1, 0]
    assert tokenizer.encode_piece(b"blue", is_first=True, is_last=True).tolist() == [70_000]
    assert tokenizer.decode([70_000, 1]) == "blue red"
    assert tokenizer.vocabulary == 70_001


@pytest.mark.parametrize(("end", "expected"), [("", 2), ("red", 1)])
def test_a_document_ends_with_the_token_of_a_usual_name_or_the_one_that_is_named(tmp_path, end, expected):
    path = saved_words(tmp_path / "words.json", end="</s>")

    tokenizer = load_tokenizer(path, end)

    assert tokenizer.end_of_document == expected
    assert tokenizer.encode_piece(b"blue", is_first=True, is_last=True).tolist() == [70_000, expected]
    assert tokenizer.encode(b"blue").tolist() == [70_000]
    again = saved_words(tmp_path / "again.json", end="</s>")
    identities = [load_tokenizer(*given).identity for given in ((path,), (path, "red"), ("bytes",))]
    assert len(set(identities)) == 3
    assert load_tokenizer(again).identity == identities[0]
    with pytest.raises(ConfigError, match=r"words.json has no token '<end>'; name one that it has") as caught:
        load_tokenizer(path, "<end>")
    assert caught.value.key == "data.end_of_document"


def test_a_run_knows_its_tokenizer_file_again(tmp_path):
    path = saved_words(tmp_path / "words.json")
    began = config_with(data={"tokenizer": path, "tokenizer_digest": tokenizer_digest(path)})

    assert tokenizer_of(began).vocabulary == 70_001
    Path(path).write_text(Path(path).read_text().replace("blue", "grey"))  # as many tokens
    with pytest.raises(
        ConfigError, match=r"words.json has changed since the run began: its sha256 begins with"
    ) as caught:
        tokenizer_of(began)

    assert caught.value.key == "data.tokenizer"
    assert tokenizer_of(config_with(data={"tokenizer": path})).vocabulary == 70_001, (
        "a run from before there were digests"
    )
    assert tokenizer_digest("bytes") == tokenizer_digest(str(tmp_path / "none.json")) == ""
    error = refusal_of(table_with(data={"tokenizer_digest": "ab"}))
    assert (error.key, "bytes have no tokenizer file" in str(error)) == ("data.tokenizer_digest", True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"{}", "is not a tokenizers JSON"),
        (b"\xff", "is not a tokenizers JSON"),
        (b'{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{},"unk_token":"?"}}', "empty vocab"),
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
    path = saved_words(tmp_path / "words.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ConfigError, match=r"pip install '\.\[tokenizers\]' in Penstock's clone"):
        load_tokenizer(path)
