"""A model that has no values is cut, and each rank reads its own part from files."""

import json

import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
from penstock.checkpoints import cutting
from penstock.checkpoints.shards import read_tensors
from penstock.errors import CheckpointError, ConfigError
from tests.models.cutting.test_cut import Model, loss_of
from tests.support.local_pipelines import on_ranks

POINTS = ["blocks.*"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def bare():
    with torch.device("meta"):
        return Model().double()


@pytest.fixture
def batch():
    words = torch.arange(48).reshape(8, 6) * 7 % 11
    return (words, torch.zeros(8, 6, dtype=torch.bool)), words.roll(-1, 1)


def saved(model, path, **changes):
    """Write a model's tensors, those that are tied once; a change is another tensor, or None for one to leave out."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    state = {name: tensor for name, tensor in (state | changes).items() if tensor is not None}
    save_file(state, path)
    return path


def as_index(model, folder):
    """Write a folder with two files and their index."""
    names = [name for name in model.state_dict() if name != "head.weight"]
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: model.state_dict()[name].clone() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize("write", [as_index, lambda model, folder: saved(model, folder / "own.safetensors")])
def test_ranks_train_as_with_the_model_itself_and_read_their_own_tensors(
    model, bare, batch, tmp_path, monkeypatch, write
):
    inputs, target = batch
    read = []
    monkeypatch.setattr(cutting, "read_tensors", lambda path, names: read.extend(names) or read_tensors(path, names))
    layers = ps.cut(bare, POINTS, weights=write(model, tmp_path))
    assert read == []

    def train(transport, layers):
        pipeline = ps.Pipeline(layers, "1f1b", 4, loss_of, transport=transport)
        losses = [pipeline.step(*inputs, target=target).loss for _ in range(2)]
        return losses, {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    found = on_ranks(2, lambda transport: train(transport, layers))
    wanted = on_ranks(2, lambda transport: train(transport, ps.cut(model, POINTS)))

    for (losses, gradients), (other_losses, other_gradients) in zip(found, wanted, strict=True):
        assert losses == other_losses
        assert gradients.keys() == other_gradients.keys()
        assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
    assert "blocks.0.norm.weight" not in found[1][1]
    untied = [name for name in read if name != "words.weight"]
    assert sorted(untied) == sorted(name for name in model.state_dict() if name not in ("words.weight", "head.weight"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm.weight": None}, r"it has no 'norm\.weight'"),
        ({"other": torch.zeros(1)}, "which also has 'other'"),
        ({"norm.weight": torch.zeros(9)}, r"'norm\.weight' has the shape \(9,\); expected \(8,\)"),
    ],
)
def test_weights_of_another_model_are_refused_when_it_is_cut(model, bare, tmp_path, changes, text):
    with pytest.raises(CheckpointError, match=text):
        ps.cut(bare, POINTS, weights=saved(model, tmp_path / "own.safetensors", **changes))


def test_a_tied_tensor_may_be_there_twice_if_it_is_the_same(model, bare, tmp_path):
    path = tmp_path / "own.safetensors"
    same = model.words.weight.detach().clone()

    head = ps.cut(bare, POINTS, weights=saved(model, path, **{"head.weight": same}))[-1]()
    assert torch.equal(head.get_submodule("head").weight, same)
    other = ps.cut(bare, POINTS, weights=saved(model, path, **{"head.weight": same + 1}))[-1]
    with pytest.raises(CheckpointError, match=r"'words\.weight' and 'head\.weight' have other values"):
        other()


def test_a_model_without_values_needs_weights_and_one_with_values_takes_none(model, bare, tmp_path):
    with pytest.raises(ConfigError, match=r"on the meta device.*pass ps\.cut weights="):
        ps.cut(bare, POINTS)
    with pytest.raises(ConfigError, match="the model has values"):
        ps.cut(model, POINTS, weights=saved(model, tmp_path / "own.safetensors"))
    with pytest.raises(CheckpointError, match="no such file or folder"):
        ps.cut(bare, POINTS, weights=tmp_path / "none")
