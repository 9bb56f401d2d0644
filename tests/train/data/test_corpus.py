"""Finding and reading the documents of a corpus."""

import os
import sysconfig
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.train.data import corpus
from penstock.train.data.corpus import Document, TextFiles, find_documents, find_standard_library


def names_of(documents):
    return [document.path.name for document in documents]


def pieces_of(path):
    return list(TextFiles([Document(path, 0, 0)]).pieces(0))


def test_folders_are_searched_by_suffix_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/c.txt", "a/d.py", "e.bin", ".hidden.txt", ".git/f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)

    documents = find_documents([str(tmp_path)], [".txt", ".py"])

    assert names_of(documents) == ["c.txt", "d.py", "b.txt"]


def test_a_named_file_is_taken_whatever_its_suffix_and_only_once_and_pipes_are_left_out_or_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match=r"no file ending in \.txt, \.md lies below") as caught:
        find_documents([str(tmp_path)], [".txt", ".md"])
    assert caught.value.key == "data.files"
    for name in ("a.bin", "b.txt"):
        (tmp_path / name).write_text("text")

    documents = find_documents([str(tmp_path / "a.bin"), str(tmp_path), str(tmp_path / "a.bin")], [".txt"])

    assert names_of(documents) == ["a.bin", "b.txt"]
    with pytest.raises(ConfigError, match=r"pipe\.txt is neither a file nor a folder"):
        find_documents([str(tmp_path / "pipe.txt")], [".txt"])


def test_files_and_folders_that_vanish_while_they_are_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.txt.*cannot be read.*No such file"):
        pieces_of(tmp_path / "gone.txt")
    with pytest.raises(ConfigError, match=r"gone.*cannot be read.*No such file"):
        list(corpus._walk(tmp_path / "gone", [".txt"]))


@pytest.mark.parametrize("name", ["none.txt", "broken.txt", "nul\0.txt"])
def test_a_missing_file_is_refused_by_name(tmp_path, name):
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")

    with pytest.raises(ConfigError, match=r"cannot be read") as caught:
        find_documents([str(tmp_path / name)], [".txt"])

    assert caught.value.key == "data.files"
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo three\nfour five", ["one\n", "two", " three\n", "four", " five"]),
        ("onewordofmany", ["onewordo", "fmany"]),
        (" wordwordword", [" wordwor", "dword"]),
        ("aéaéaéaé", ["aéaéa", "éaé"]),
        ("short", ["short"]),
        ("", []),
    ],
)
def test_a_piece_ends_behind_a_line_else_before_a_space_else_between_characters(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 8)
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")

    assert "".join(piece.decode() for piece in pieces_of(path)) == text
    assert [piece.decode() for piece in pieces_of(path)] == expected


@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [
        ("né".encode() + b"\xe9t\xe9", "0xe9", 3),
        (b"0123456\nabc\xff", "0xff", 11),
        ("0123456é".encode()[:-1] + b"x", "0xc3", 7),
        ("é".encode()[:1], "0xc3", 0),
    ],
)
def test_bytes_that_are_not_utf8_are_named_with_their_offset_in_the_file(tmp_path, monkeypatch, content, byte, offset):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 8)
    path = tmp_path / "a.txt"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"a\.txt: byte {byte} at offset {offset} is not UTF-8") as caught:
        pieces_of(path)

    assert caught.value.key == "data.files"


def test_the_standard_library_is_megabytes_of_sources_without_tests():
    documents = find_standard_library()

    assert sum(document.size_bytes for document in documents) > 5_000_000
    assert {"os.py", "tokenize.py"} <= set(names_of(documents))
    library = sysconfig.get_path("stdlib")  # which may lie below a folder called test itself
    parts = {part for document in documents for part in document.path.relative_to(library).parts}
    assert not {"test", "site-packages"} & parts
    assert all(isinstance(document.path, Path) and document.path.suffix == ".py" for document in documents)
