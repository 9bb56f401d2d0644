"""`penstock convert --like`: weights of Penstock become a folder that transformers loads."""

import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoints.shards import write_tensors
from penstock.cli.entry import main
from tests.checkpoints.written_files import names
from tests.hugging_face.tiny_models import FAMILIES, saved_model

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder where the command runs, with a model `like` and a file of other weights of it, `own.safetensors`."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "llama")
    return tmp_path


def make(folder, family):
    """Write a model, and weights that are another one's, under the names of modules."""
    saved = saved_model(family, folder / "like")
    (folder / "like" / "tokenizer.json").write_text("{}")
    tied = saved.empty.all_tied_weights_keys
    state = {name: value + 1 for name, value in saved.state.items() if name not in tied}
    write_tensors(folder / "own.safetensors", state)
    return state


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "llama" else pytest.mark.slow) for name in FAMILIES]
)
def test_transformers_loads_what_is_written(folder, capsys, family):
    from transformers import AutoModelForCausalLM

    state = make(folder, family)
    capsys.readouterr()

    assert main(["convert", "own.safetensors", "out", "--like", "like"]) == 0

    model, info = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    told = f"out: {type(model).__name__} with the weights of own.safetensors, in 1 file\n"
    assert capsys.readouterr().out == told
    assert not any(info.values())
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert names(folder / "out") == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert load_file(folder / "out/model.safetensors").keys() == load_file(folder / "like/model.safetensors").keys()


def test_a_folder_with_something_in_it_is_written_on_request_only(folder, refused):
    (folder / "out").mkdir()
    assert main(["convert", "own.safetensors", "out", "--like", "like"]) == 0, "an empty folder is free"
    (folder / "out" / "model.safetensors").unlink()
    (folder / "out" / "notes.txt").write_text("precious")
    before = names(folder / "out")

    told = "OUT: out exists and is not empty; give another name, or --force to replace the model in it"
    assert told in refused("convert", "own.safetensors", "out", "--like", "like")
    assert names(folder / "out") == before

    assert main(["convert", "own.safetensors", "out", "--like", "like", "--force"]) == 0
    assert {"notes.txt", "model.safetensors"} < set(names(folder / "out"))


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["none", "out", "--like", "like"], 6, "none: there is no such file or folder; expected weights, or a run"),
        (["own.safetensors", "out", "--like", "."], 1, "--like: .: holds no config.json; give a folder that"),
        (["own.safetensors", "own.safetensors", "--like", "like"], 1, "OUT: own.safetensors is not a folder"),
        (["own.safetensors", "nowhere/out", "--like", "like"], 1, "OUT: nowhere is not a folder; make it first"),
        (
            ["other.safetensors", "out", "--like", "like"],
            6,
            "which also has 'model.norms.weight'. Did you mean 'model.norm.weight'",
        ),
        (
            ["own.safetensors", "out", "--like", "like", "--to", "csv"],
            1,
            "--to: is for schedules, and --like for weights",
        ),
    ],
)
def test_what_cannot_be_converted_is_one_message_and_leaves_nothing_behind(folder, refused, arguments, status, told):
    state = load_file(folder / "own.safetensors")
    state["model.norms.weight"] = state.pop("model.norm.weight")
    write_tensors(folder / "other.safetensors", state)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    error = refused("convert", *arguments, status=status)

    assert told in error
    assert len(error.splitlines()) == 1
    assert not (folder / "out").exists()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
