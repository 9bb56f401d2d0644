"""A run of a cut model compares it with the unsplit one before its first step, and says in a line that it did."""

import runpy
from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError, PenstockError
from penstock.models.cutting.part import CutPart
from penstock.train import model_check
from penstock.train.folder.run_folder import RunFolder
from penstock.train.model_check import check_model, verify_run
from penstock.train.settings.config import config_from_table
from tests.house.source import ROOT
from tests.train.tiny_runs import tiny_table, trained

pytest.importorskip("transformers")
TEXT = "one two three four five six seven eight nine ten " * 200


class TwoRows:
    """Data of a fixed batch."""

    vocabulary = 64

    def batch(self, number):
        from penstock.execute.batch.stream import Part

        tokens = torch.arange(4 * 40).view(4, 40) % 64
        return Part(tokens, target=tokens.roll(-1, 1), position_ids=torch.arange(40).expand(4, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    runpy.run_path(str(ROOT / "examples" / "llama" / "make_tiny.py"))["write"](folder / "tiny")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def config(folder, tmp_path):
    def make(**model):
        table = tiny_table(tmp_path / "run", folder / "text.txt", run={"steps": 1})
        table["model"] = {"transformers": str(folder / "tiny"), **model}
        return config_from_table(table)

    return make


def line_of(config):
    return check_model(config, TwoRows(), RunFolder(Path(config.run.folder)))


@pytest.fixture
def broken(monkeypatch):
    forward = CutPart.forward
    monkeypatch.setattr(CutPart, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 1.01)


def test_the_model_of_a_run_is_verified_on_a_small_part_of_a_batch(config):
    report = verify_run(config(), TwoRows())

    assert report.is_right, str(report)
    assert line_of(config()).startswith("verified: the layers compute what the whole model does, within ")


@pytest.mark.slow
def test_a_run_that_begins_is_verified_and_one_that_goes_on_is_not(folder, tmp_path):
    table = tiny_table(tmp_path / "run", folder / "text.txt", run={"steps": 1}, checkpoint={"every": 1})
    table["model"] = {"transformers": str(folder / "tiny")}

    _, printed = trained(table)
    table["run"]["steps"] = 2
    _, printed_again = trained(table)

    assert "\nverified: " in printed
    assert "verified" not in printed_again


def test_a_wrong_model_ends_the_run_before_its_first_step(config, broken):
    with pytest.raises(PenstockError, match="wrong: evaluation, batch 0: output 'output' of module"):
        line_of(config())


def test_a_run_may_go_without(config, broken):
    assert line_of(config(verify=False)) == ""


def test_a_model_that_does_not_fit_is_not_verified_unless_asked_for(config, monkeypatch, broken):
    monkeypatch.setattr(model_check, "_available_bytes", lambda device: 2**20)

    line = line_of(config())

    assert line.startswith("the model is not verified: that takes 4.")
    assert "1.00 MiB are free" in line
    with pytest.raises(PenstockError, match="wrong"):
        line_of(config(verify=True))


def test_a_list_of_layers_has_nothing_to_compare_with(tmp_path):
    config = config_from_table(tiny_table(tmp_path / "run", "text.txt"))

    assert line_of(config) == ""
    with pytest.raises(ConfigError, match="no unsplit model to compare with"):
        verify_run(config, TwoRows())


def test_a_list_of_layers_cannot_be_asked_for(tmp_path):
    table = tiny_table(tmp_path / "run", "text.txt")
    table["model"]["verify"] = True

    with pytest.raises(ConfigError, match=r"model\.verify: is for a model that is cut"):
        config_from_table(table)


def test_memory_is_counted():
    assert model_check._available_bytes(torch.device("cpu")) > 2**20
