"""Token files in the making."""

import os
import shutil

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.train.data.unfinished import unfinished_tokens

IDS = np.arange(4, dtype="<u2")


def open_tokens(cache, digest="a", **options):
    return unfinished_tokens(cache, "key", digest=digest, item_bytes=2, **options)


def interrupted(cache, digest="a"):
    def write():
        with open_tokens(cache, digest) as writer:
            writer.write(IDS, 7, is_last=True)
            writer.write(IDS[:2], 3, is_last=False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()


def test_the_next_process_writes_on_where_one_was_interrupted(tmp_path):
    interrupted(tmp_path)

    with open_tokens(tmp_path) as writer:
        assert (writer.place.document, writer.place.offset, writer.place.num_tokens) == (1, 3, 6)
        writer.write(IDS[2:], 4, is_last=True)
        writer.finish(tmp_path / "a.tokens", tmp_path / "a.ends")

    assert np.fromfile(tmp_path / "a.tokens", dtype="<u2").tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert np.fromfile(tmp_path / "a.ends", dtype="<i8").tolist() == [4, 8]
    assert sorted(os.listdir(tmp_path)) == ["a.ends", "a.tokens"]


def test_what_was_written_after_the_last_place_does_not_count(tmp_path):
    interrupted(tmp_path)
    folder = tmp_path / "key.unfinished"
    for name in ("tokens", "ends"):
        with (folder / name).open("ab") as file:
            file.write(b"torn")

    with open_tokens(tmp_path) as writer:
        writer.write(IDS[2:], 4, is_last=True)
        writer.finish(tmp_path / "a.tokens", tmp_path / "a.ends")

    assert np.fromfile(tmp_path / "a.tokens", dtype="<u2").tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert np.fromfile(tmp_path / "a.ends", dtype="<i8").tolist() == [4, 8]


@pytest.mark.parametrize("damage", ["other documents", "short tokens", "short ends", "no place", "bad place"])
def test_what_cannot_be_continued_begins_anew(tmp_path, damage):
    interrupted(tmp_path)
    folder = tmp_path / "key.unfinished"
    match damage:
        case "short tokens":
            os.truncate(folder / "tokens", 3)
        case "short ends":
            os.truncate(folder / "ends", 3)
        case "no place":
            (folder / "place.json").unlink()
        case "bad place":
            (folder / "place.json").write_text('{"digest": "a", "document": -1}')

    with open_tokens(tmp_path, "b" if damage == "other documents" else "a") as writer:
        assert writer.place.num_tokens == 0
        writer.write(IDS, 7, is_last=True)
        writer.finish(tmp_path / "a.tokens", tmp_path / "a.ends")

    assert np.fromfile(tmp_path / "a.tokens", dtype="<u2").tolist() == [0, 1, 2, 3]
    assert np.fromfile(tmp_path / "a.ends", dtype="<i8").tolist() == [4]


def test_the_place_is_kept_every_few_seconds_for_a_process_that_is_killed(tmp_path):
    seconds = iter([0.0, 1.0, 4.9, 5.0, 5.0, 6.0])

    with open_tokens(tmp_path, clock=lambda: next(seconds)) as writer:
        writer.write(IDS, 7, is_last=True)
        writer.write(IDS, 7, is_last=True)
        assert not (tmp_path / "key.unfinished" / "place.json").exists()
        writer.write(IDS, 7, is_last=True)
        writer.write(IDS, 7, is_last=True)
        shutil.copytree(tmp_path / "key.unfinished", tmp_path / "killed" / "key.unfinished")
        writer.discard()

    with open_tokens(tmp_path / "killed") as writer:
        assert (writer.place.document, writer.place.num_tokens) == (3, 12)
        writer.discard()


def test_a_second_process_writes_into_a_folder_of_its_own(tmp_path):
    with open_tokens(tmp_path) as first, open_tokens(tmp_path) as second:
        first.write(IDS, 7, is_last=True)
        second.write(IDS, 7, is_last=True)
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

    with open_tokens(tmp_path) as writer:
        writer.write(IDS, 7, is_last=True)
        writer.finish(tmp_path / "a.tokens", tmp_path / "a.ends")

    assert (tmp_path / "a.tokens").read_bytes() == IDS.tobytes()


def test_an_error_removes_what_is_written(tmp_path):
    def write():
        with open_tokens(tmp_path) as writer:
            writer.write(IDS, 7, is_last=True)
            raise OSError(28, "No space left on device")

    with pytest.raises(PenstockError, match="cannot be written: No space left"):
        write()

    assert os.listdir(tmp_path) == []


def test_what_others_left_is_removed_after_an_hour(tmp_path):
    for name in ("other.unfinished", "key.1234.unfinished", "new.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").touch()
        if name != "new.unfinished":
            os.utime(tmp_path / name / "tokens", (0, 0))
    interrupted(tmp_path)
    os.utime(tmp_path / "key.unfinished" / "tokens", (0, 0))

    with open_tokens(tmp_path) as writer:
        assert writer.place.num_tokens == 6
        assert sorted(os.listdir(tmp_path)) == ["key.unfinished", "new.unfinished"]
