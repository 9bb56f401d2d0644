"""A folder that is found again under another name."""

import gc
import os

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


def test_nothing_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")

    HeldFolder(tmp_path)
    gc.collect()

    assert os.listdir("/proc/self/fd") == before
