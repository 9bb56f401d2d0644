"""Token files in the making."""

import os

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.train.data.unfinished import unfinished_tokens

IDS = np.arange(4, dtype="<u2")


def fail_with(error, cache):
    """Write into a token file until an error or an interruption comes."""
    with unfinished_tokens(cache, "key") as writer:
        writer.write(IDS, is_last=True)
        raise error


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


def test_an_error_removes_what_is_written(tmp_path):
    with pytest.raises(PenstockError, match="cannot be written: No space left"):
        fail_with(OSError(28, "No space left on device"), tmp_path)

    assert os.listdir(tmp_path) == []


def test_an_interruption_removes_what_is_written(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fail_with(KeyboardInterrupt(), tmp_path)

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
