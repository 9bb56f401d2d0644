"""`penstock verify`: of a function or a run file; the exit status says whether the parts are right."""

import runpy

import pytest
import tomlkit

from penstock.cli.entry import main
from tests.house.source import ROOT
from tests.train.tiny_runs import tiny_table

MODELS = """
import torch
from torch import nn
import penstock as ps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, features):
        for block in self.blocks:
            features = block(features).tanh()
        return features


def right():
    return Net(), ["blocks.*"], torch.randn(4, 3), torch.randn(4, 3)


def by_name():
    batch = {"features": torch.randn(4, 3), "target": torch.randn(4, 3)}
    options = {"loss": nn.functional.mse_loss, "ranks": 3, "schedule": "gpipe"}
    return {"model": Net(), "points_or_layers": ["blocks.*"], "batches": [batch], **options}


def wrong():
    net = Net()
    return net, [nn.Sequential(block) for block in net.blocks], torch.randn(4, 3)


def refused():
    return {**by_name(), "ranks": 9}


def no_batch():
    return Net(), ["blocks.*"]


def unknown():
    return {**by_name(), "rank": 2}


def missing():
    return {"model": Net(), "batches": []}


def nothing():
    return None


def fails():
    raise ValueError("no model today")
"""


@pytest.fixture
def verified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)

    def run(*words):
        status = main(["verify", *words])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("name", "status", "last"),
    [
        ("right", 0, "right: no difference is larger than "),
        ("by_name", 0, "right: no difference is larger than "),
        ("wrong", 1, "wrong: "),
        ("refused", 1, "refused: "),
    ],
)
def test_a_function_and_its_status(verified, name, status, last):
    found_status, printed, complaint = verified(f"models.py:{name}")

    assert found_status == status
    assert any(line.startswith(last) for line in printed.splitlines()), printed
    assert complaint == ""


def test_the_split_that_a_function_asks_for_is_run(verified):
    assert verified("models.py:by_name")[1].startswith("Net in 3 layers on 3 ranks, gpipe, 2 batches of 2 microbatches")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models.py:no_batch"], "models.py:no_batch returned (Net("),
        (["models.py:unknown"], "a dict with 'rank'; expected some of"),
        (["models.py:missing"], "a dict without points_or_layers; add it"),
        (["models.py:nothing"], "models.py:nothing returned None; expected (model, points, *batches)"),
        (["models.py:fails"], "models.py:fails failed: ValueError: no model today"),
        (["models.py:other"], "has no function 'other'"),
        (["models"], "is not of the form FILE:NAME"),
        (["models.py:right", "--set", "a=1"], "--set: a=1 sets a key of a run file"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_what_cannot_be_verified_is_one_message(verified, words, message):
    status, printed, complaint = verified(*words)

    assert (status, printed) == (1, "")
    assert message in complaint


def write_run(folder, **model):
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten " * 200)
    table = tiny_table(folder / "run", folder / "text.txt")
    table["model"] = model or table["model"]
    (folder / "run.toml").write_text(tomlkit.dumps(table))


@pytest.mark.slow
def test_a_run_file_of_a_model_of_transformers(verified, tmp_path):
    pytest.importorskip("transformers")
    runpy.run_path(str(ROOT / "examples" / "llama" / "make_tiny.py"))["write"](tmp_path / "tiny")
    write_run(tmp_path, transformers="tiny")

    status, printed, complaint = verified("run.toml", "--set", "model.dtype=float64")

    assert status == 0, complaint
    assert printed.startswith("LlamaForCausalLM in 6 layers on 2 ranks")
    assert not (tmp_path / "run").exists()


def test_a_run_file_without_a_cut_model(verified, tmp_path):
    write_run(tmp_path)

    status, _, complaint = verified("run.toml")

    assert status == 1
    assert "no unsplit model to compare with" in complaint
