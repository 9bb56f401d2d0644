"""The token cache."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.train.data.corpus import TextFiles, find_documents
from penstock.train.data.tokenizer import Tokenizer, load_tokenizer
from penstock.train.data.tokens import tokenize, unfinished_tokens

BYTES = load_tokenizer("bytes")
IDS = np.arange(4, dtype="<u2")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in {"a.txt": "first", "b.txt": "second", "c.txt": "first", "d.txt": ""}.items():
        (folder / name).write_text(text)
    return folder


def documents_of(folder):
    return TextFiles(find_documents([str(folder)], [".txt"]))


def test_each_distinct_document_is_kept_once(corpus, tmp_path):
    found = tokenize(documents_of(corpus), BYTES, tmp_path / "cache")

    assert sorted(bytes(found.tokens()).split(b"\0")) == [b"", b"first", b"second"]
    assert (found.manifest.num_documents, found.manifest.num_duplicates) == (2, 2)
    assert found.manifest.num_tokens == len("first" + "second") + 2
    assert sorted(np.diff(found.document_ends(), prepend=0)) == [len("first") + 1, len("second") + 1]
    assert all(found.tokens()[end - 1] == 0 for end in found.document_ends())


def test_tokens_and_digest_do_not_depend_on_where_the_files_lie(corpus, tmp_path):
    elsewhere = tmp_path / "z"
    elsewhere.mkdir()
    (elsewhere / "x.txt").write_text("second")
    (elsewhere / "y.txt").write_text("first")

    first = tokenize(documents_of(corpus), BYTES, tmp_path / "cache")
    second = tokenize(documents_of(elsewhere), BYTES, tmp_path / "cache")

    assert first.path != second.path
    assert first.manifest.digest == second.manifest.digest
    assert np.array_equal(first.tokens(), second.tokens())


def test_progress_is_told_after_each_piece_in_bytes(corpus, tmp_path):
    told = []

    tokenize(documents_of(corpus), BYTES, tmp_path / "cache", tell=lambda *numbers: told.append(numbers))

    assert told[:3] == [("reading", 5, 16), ("reading", 11, 16), ("reading", 16, 16)]
    assert told[3:] in (  # each text once, in the order of hashes
        [("tokenizing", 5, 11), ("tokenizing", 11, 11)],
        [("tokenizing", 6, 11), ("tokenizing", 11, 11)],
    )


def test_the_second_run_tokenizes_nothing_and_one_with_another_cache_takes_from_there(corpus, tmp_path):
    calls = []
    tokenizer = Tokenizer("bytes", 256, lambda content: calls.append(content) or BYTES.encode(content), str, 0)
    others = [tmp_path / "missing", tmp_path / "cache"]

    first = tokenize(documents_of(corpus), tokenizer, tmp_path / "cache")
    assert len(calls) == 2
    assert tokenize(documents_of(corpus), tokenizer, tmp_path / "cache") == first
    found = tokenize(documents_of(corpus), tokenizer, tmp_path / "second", other_caches=others)

    assert (len(calls), found.path) == (2, first.path)
    assert not (tmp_path / "second").exists()


def test_a_changed_file_is_tokenized_again(corpus, tmp_path):
    before = tokenize(documents_of(corpus), BYTES, tmp_path / "cache")
    (corpus / "a.txt").write_text("third word")

    after = tokenize(documents_of(corpus), BYTES, tmp_path / "cache")

    assert before.manifest.digest != after.manifest.digest
    assert b"third word" in bytes(after.tokens())


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [("json", b"{"), ("tokens", b"short"), ("tokens", None)],
)
def test_a_damaged_cache_is_made_again(corpus, tmp_path, suffix, damage):
    intact = tokenize(documents_of(corpus), BYTES, tmp_path / "cache")
    content = bytes(intact.tokens())
    path = intact.path.with_suffix(f".{suffix}")
    path.unlink() if damage is None else path.write_bytes(damage)

    again = tokenize(documents_of(corpus), BYTES, tmp_path / "cache")

    assert bytes(again.tokens()) == content


def test_writers_that_race_agree(corpus, tmp_path):
    documents = documents_of(corpus)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: tokenize(documents, BYTES, tmp_path / "cache"), range(8)))

    assert len({bytes(file.tokens()) for file in found}) == 1
    assert sorted(name.split(".")[1] for name in os.listdir(tmp_path / "cache")) == ["ends", "json", "tokens"]


@pytest.mark.parametrize(("vocabulary", "item_bytes"), [(256, 1), (65_536, 2), (65_537, 4)])
def test_tokens_take_the_smallest_type_that_holds_the_vocabulary(corpus, tmp_path, vocabulary, item_bytes):
    tokenizer = Tokenizer("largest", vocabulary, lambda content: np.array([vocabulary - 1], dtype=np.uint32), str, None)

    found = tokenize(documents_of(corpus), tokenizer, tmp_path / "cache")

    assert found.tokens().tolist() == [vocabulary - 1] * 2
    assert found.manifest.item_bytes == item_bytes


def test_an_empty_corpus_and_a_cache_that_cannot_be_created_are_refused_and_leave_nothing(tmp_path):
    (tmp_path / "a.txt").touch()

    with pytest.raises(ConfigError, match="the corpus is empty: its 1 files hold no text") as caught:
        tokenize(documents_of(tmp_path), BYTES, tmp_path / "cache")

    assert caught.value.key == "data.files"
    assert os.listdir(tmp_path / "cache") == []
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a\.txt/cache: the folder for tokens cannot be created: Not a directory"):
        tokenize(documents_of(tmp_path), BYTES, tmp_path / "a.txt" / "cache")


def test_text_of_which_a_tokenizer_makes_no_token_is_refused_and_leaves_nothing(corpus, tmp_path):
    nothing = Tokenizer("nothing", 256, lambda content: np.array([], dtype=np.uint32), str, None)

    with pytest.raises(ConfigError, match=r"the corpus is empty: its \d files have no tokens; name files with text"):
        tokenize(documents_of(corpus), nothing, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("text", ["other", ""], ids=["other", "shorter"])
def test_a_document_that_changes_between_the_two_readings_is_refused(corpus, tmp_path, text):
    def encode(content):
        for name in ("a.txt", "b.txt", "c.txt"):
            (corpus / name).write_text(text)
        return BYTES.encode(content)

    with pytest.raises(ConfigError, match="changed while it was read"):
        tokenize(documents_of(corpus), Tokenizer("bytes", 256, encode, str, 0), tmp_path / "cache")


MEASURED = """
import resource, sys
from pathlib import Path
from penstock.train.data import corpus
from penstock.train.data.tokenizer import load_tokenizer
from penstock.train.data.tokens import tokenize

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

files = corpus.TextFiles(corpus.find_documents([sys.argv[1]], [".txt"]))
tokenizer = load_tokenizer(sys.argv[3])
tokenizer.encode(b"warm up ")
before = peak()
tokenize(files, tokenizer, Path(sys.argv[2]))
print((peak() - before) >> 10)
"""


@pytest.mark.slow
def test_a_document_that_is_larger_than_the_memory_it_may_take_is_tokenized(tmp_path):
    allowed_mib, path = 48, tmp_path / "a.txt"
    line = b"a line of some length, and then another one\n"
    with path.open("wb") as file:
        for _ in range(160):
            file.write(line * ((1 << 20) // len(line)))
    assert path.stat().st_size > 3 * allowed_mib << 20

    command = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / "cache"), "bytes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert int(done.stdout) < allowed_mib


@pytest.fixture
def killed(tmp_path):
    """The folder of a process that was killed between two documents, and had not written all of its last line."""
    folder = tmp_path / "key.unfinished"
    folder.mkdir()
    for name in ("tokens", "ends"):
        (folder / name).write_bytes(b"torn and much longer than what follows")
    return folder


def test_the_next_process_begins_again_in_the_folder_of_one_that_was_killed(tmp_path, killed):
    with unfinished_tokens(tmp_path, "key") as writer:
        assert writer.folder == killed
        writer.write(IDS, is_last=True)
        writer.write(IDS[:2], is_last=False)
        writer.write(IDS[2:], is_last=True)
        assert not [name for name in os.listdir(tmp_path) if name.endswith((".tokens", ".ends"))]
        writer.finish(tmp_path / "a.tokens", tmp_path / "a.ends")

    assert np.fromfile(tmp_path / "a.tokens", dtype="<u2").tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert np.fromfile(tmp_path / "a.ends", dtype="<i8").tolist() == [4, 8]
    assert sorted(os.listdir(tmp_path)) == ["a.ends", "a.tokens"]


def test_a_second_process_writes_into_a_folder_of_its_own(tmp_path):
    with unfinished_tokens(tmp_path, "key") as first, unfinished_tokens(tmp_path, "key") as second:
        first.write(IDS, is_last=True)
        second.write(IDS, is_last=True)
        assert first.folder != second.folder
        second.finish(tmp_path / "b.tokens", tmp_path / "b.ends")
        first.finish(tmp_path / "a.tokens", tmp_path / "a.ends")

    assert (tmp_path / "a.tokens").read_bytes() == (tmp_path / "b.tokens").read_bytes() == IDS.tobytes()
    assert sorted(os.listdir(tmp_path)) == ["a.ends", "a.tokens", "b.ends", "b.tokens"]


def test_a_folder_that_goes_while_a_process_makes_it_is_not_missed(tmp_path, monkeypatch):
    def make(path, **options):
        if options.get("exist_ok"):
            raise FileExistsError(path)  # it was there, and was no more when pathlib looked whether it is a folder
        os.mkdir(path)

    monkeypatch.setattr(type(tmp_path), "mkdir", make)

    with unfinished_tokens(tmp_path, "key") as writer:
        writer.write(IDS, is_last=True)
        writer.finish(tmp_path / "a.tokens", tmp_path / "a.ends")

    assert (tmp_path / "a.tokens").read_bytes() == IDS.tobytes()


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (OSError(28, "No space left on device"), PenstockError, "cannot be written: No space left"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_an_error_and_an_interruption_remove_what_is_written(tmp_path, error, raised, told):
    def fail():
        with unfinished_tokens(tmp_path, "key") as writer:
            writer.write(IDS, is_last=True)
            raise error

    with pytest.raises(raised, match=told):
        fail()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_left_is_removed_after_an_hour_but_for_that_of_the_key(tmp_path, killed):
    for name in ("other.unfinished", "key.1234.unfinished", "new.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").touch()
        if name != "new.unfinished":
            os.utime(tmp_path / name / "tokens", (0, 0))
    os.utime(killed / "tokens", (0, 0))

    with unfinished_tokens(tmp_path, "key"):
        assert sorted(os.listdir(tmp_path)) == ["key.unfinished", "new.unfinished"]
