"""Files that appear whole or not at all."""

import os
import resource
from contextlib import contextmanager, suppress

import pytest

from penstock.errors import PenstockError
from penstock.files import atomic_file, remove_abandoned


@contextmanager
def largest_file(size_bytes):
    """The kernel refuses longer files, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(path, content):
    with atomic_file(path) as file:
        file.write(content)


def test_the_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "a"

    with atomic_file(path) as file:
        file.write(b"text")
        assert not path.exists()

    assert path.read_bytes() == b"text"
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupted_write_keeps_the_old_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "a"
    write(path, b"old")

    with suppress(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_and_a_folder_that_is_none_name_the_path_and_leave_nothing(tmp_path):
    with largest_file(100_000), pytest.raises(PenstockError, match=r"tokens: cannot be written: File too large"):
        write(tmp_path / "tokens", b"x" * 200_000)

    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(PenstockError, match=r"file/a: cannot be written: Not a directory"):
        write(tmp_path / "file" / "a", b"")


def test_only_files_that_no_writer_touched_for_an_hour_are_removed(tmp_path):
    for name, age_s in (("old.partial", 4000), ("new.partial", 3000), ("old.tokens", 4000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (10_000 - age_s, 10_000 - age_s))

    remove_abandoned(tmp_path, now_s=10_000)

    assert sorted(os.listdir(tmp_path)) == ["new.partial", "old.tokens"]
