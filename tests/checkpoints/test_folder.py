"""The folder of checkpoints: names, announcing, keeping."""

import os
import time

import pytest

from penstock.checkpoints.folder import CheckpointFolder, step_of
from penstock.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def announce(folder, *steps):
    for step in steps:
        partial = folder.begin(step)
        (partial / "file").touch()
        folder.announce(partial, step)


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def test_nothing_is_a_checkpoint_before_it_is_announced_and_the_newest_is_the_first(folder):
    assert folder.steps() == []
    partial = folder.begin(3)

    assert folder.steps() == []
    assert folder.announce(partial, 3) == folder.path / "step-3"
    assert folder.steps() == [3]
    assert not partial.exists()
    announce(folder, 9, 100, 20)
    assert folder.steps() == [100, 20, 9, 3]


@pytest.mark.parametrize("name", ["step-", "step-01", "step-x", "step-1.damaged-1", "step-1.abc.partial", "other"])
def test_other_names_are_no_steps(folder, name):
    assert step_of(folder.path / name) is None


def test_a_checkpoint_is_never_written_over_but_set_aside_to_make_room(folder):
    announce(folder, 3)

    with pytest.raises(CheckpointError, match="step-3: exists already, and a checkpoint is never written over"):
        announce(folder, 3)
    assert folder.set_aside(3).name == "step-3.damaged-1"
    announce(folder, 3)
    assert folder.set_aside(3).name == "step-3.damaged-2"
    assert folder.steps() == []


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 2, "keep_every": 0}, [50, 40]),
        ({"keep_last": 1, "keep_every": 20}, [50, 40, 20]),
        ({"keep_last": 0, "keep_every": 0}, [50, 40, 30, 20, 10]),
        ({"keep_last": 9, "keep_every": 0}, [50, 40, 30, 20, 10]),
    ],
)
def test_the_last_ones_and_every_nth_stay(folder, keep, left):
    announce(folder, 10, 20, 30, 40, 50)

    folder.retain(50, **keep)

    assert folder.steps() == left
    assert len(names(folder)) == len(left)


def test_what_killed_writers_left_is_swept_and_nothing_else(folder):
    announce(folder, 1)
    folder.set_aside(1)
    announce(folder, 1)
    (folder.begin(2) / "half").touch()

    folder.sweep(older_than_s=3600.0)
    assert len(names(folder)) == 3
    folder.sweep()
    assert names(folder) == ["step-1", "step-1.damaged-1"]


def test_a_new_save_sweeps_what_is_old(folder):
    old = folder.begin(1)
    before_s = time.time() - 7200
    os.utime(old, (before_s, before_s))

    new = folder.begin(2)

    assert names(folder) == [new.name]


def test_a_checkpoint_that_is_half_removed_is_none(folder, monkeypatch):
    announce(folder, 1, 2)

    def die(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.checkpoints.folder.shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        folder.retain(2, keep_last=1, keep_every=0)

    assert folder.steps() == [2]
