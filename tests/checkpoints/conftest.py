"""A folder of checkpoints that tests may change."""

import shutil

import pytest

from tests.checkpoints.training import train_on


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2 of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    train_on(2, 0, 1, save=folder)
    train_on(2, 1, 2, load=folder, save=folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")
