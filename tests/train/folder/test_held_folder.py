"""A folder that is found again under another name."""

import gc
import os
from contextlib import suppress

from penstock.train.folder.held_folder import HeldFolder


def test_a_folder_that_was_renamed_is_found(tmp_path):
    (tmp_path / "run").mkdir()
    held = HeldFolder(tmp_path / "run")
    assert held.is_in_place
    assert held.found() == tmp_path / "run"

    (tmp_path / "run").rename(tmp_path / "kept")
    (tmp_path / "run").mkdir()  # another one

    assert not held.is_in_place
    assert held.found() == tmp_path / "kept"


def test_a_folder_that_was_removed_is_not_found(tmp_path):
    (tmp_path / "run").mkdir()
    held = HeldFolder(tmp_path / "run")

    (tmp_path / "run").rmdir()

    assert held.found() is None


def opened():
    """Where the open files of this process are; other tests may leave some that are closed at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one by which the list is read
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_nothing_stays_open(tmp_path):
    held = HeldFolder(tmp_path)
    assert str(tmp_path) in opened()

    del held
    gc.collect()

    assert str(tmp_path) not in opened()
