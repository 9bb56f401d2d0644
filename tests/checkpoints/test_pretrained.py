"""Weights to begin with."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from penstock.checkpoints.pretrained import files_of, find_weights, load_weights, require_weights
from penstock.errors import CheckpointError
from tests.checkpoints.training import assert_equal, train_on
from tests.support.local_pipelines import error_of
from tests.train.local_ranks import on_small_pipelines, small_layers, small_pipeline


@pytest.fixture(scope="module")
def weights():
    return train_on(1, 0, 1)[1]


def loaded(path, num_ranks=2, **options):
    """Load on some ranks; return the weights of all."""

    def case(pipeline):
        load_weights(path, pipeline)
        return {name: value.detach().clone() for name, value in pipeline.state_dict().items()}

    parts = on_small_pipelines(num_ranks, case, small_layers(**options))
    return {name: value for part in parts for name, value in part.items()}


def test_one_file_is_loaded_by_any_number_of_ranks_which_convert_types(weights, tmp_path):
    save_file(weights, tmp_path / "some.safetensors")

    for num_ranks in (1, 3):
        assert_equal(loaded(tmp_path / "some.safetensors", num_ranks), weights)
    assert_equal(loaded(tmp_path), weights)
    rounded = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    save_file(rounded, tmp_path / "some.safetensors")
    assert_equal(loaded(tmp_path), {name: value.float() for name, value in rounded.items()})


def test_a_checkpoint_and_a_run_folder_are_loaded(weights, tmp_path):
    train_on(2, 0, 1, save=tmp_path / "checkpoints")

    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-1"):
        assert_equal(loaded(path), weights)
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "weights.safetensors")
    assert find_weights(tmp_path) == tmp_path / "weights.safetensors"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tied_weight_exported_once_is_loaded_everywhere(tmp_path, num_ranks):
    _, expected, _ = train_on(2, 0, 1, save=tmp_path, tied_head=True)

    found = loaded(tmp_path, num_ranks, tied_head=True)

    assert torch.equal(found["head.weight"], found["embedding.weight"])
    assert_equal(found, expected)


def save_two_files(folder):
    (folder / "missing").mkdir()
    for name in "ab":
        save_file({name: torch.zeros(1)}, folder / "missing" / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: None, "missing: there is no such file or folder"),
        (lambda folder: (folder / "missing").write_bytes(pickle.dumps({})), "missing: is no safetensors file"),
        (lambda folder: (folder / "missing").mkdir(), "holds neither weights nor a checkpoint"),
        (lambda folder: torch.save({}, folder / "a.bin"), "It holds a pickle (a.bin), which is not read."),
        (save_two_files, "holds 0 indices and 2 safetensors files; expected one index, or one file."),
    ],
)
def test_what_is_no_weights_is_refused(tmp_path, damage, words):
    damage(tmp_path)

    assert words in str(error_of(lambda: loaded(tmp_path if "a.bin" in words else tmp_path / "missing")))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": 3}'])
def test_a_wrong_index_is_named(tmp_path, text):
    (tmp_path / "x.safetensors.index.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"x\.safetensors\.index\.json: "):
        files_of(tmp_path)


def test_weights_of_another_model_are_found_by_names_and_shapes_with_and_without_a_model(weights, tmp_path):
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    train_on(2, 0, 1, save=tmp_path / "checkpoints")
    (tmp_path / "shards").mkdir()
    names = sorted(weights)
    files = {name: f"{name in names[:5]}.safetensors" for name in names}
    for file in set(files.values()):
        save_file(
            {name: weights[name].contiguous() for name in names if files[name] == file}, tmp_path / "shards" / file
        )
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file(weights, tmp_path / "one.safetensors")
    wrong = {
        "it has no 'more'": {**shapes, "more": (1,)},
        "which also has 'norm.weight'": {name: shape for name, shape in shapes.items() if name != "norm.weight"},
        "'norm.weight' has the shape (16,); expected (3,)": {**shapes, "norm.weight": (3,)},
    }

    for path in (tmp_path / "checkpoints", tmp_path / "shards", tmp_path / "one.safetensors"):
        require_weights(path, shapes)
        for words, expected in wrong.items():
            assert words in str(error_of(require_weights, path, expected))
    with small_pipeline(None, small_layers()[:-2]) as pipeline:
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        error = error_of(load_weights, tmp_path / "one.safetensors", pipeline)
        assert isinstance(error, CheckpointError)
        assert "which also has 'head.weight', 'norm.weight'" in str(error)
        assert_equal(pipeline.state_dict(), before)


def test_the_newest_checkpoint_that_can_be_read_is_compared(weights, tmp_path):
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    train_on(1, 0, 1, save=tmp_path)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2")
    (tmp_path / "step-2" / "checkpoint.json").write_bytes(b"{}")

    require_weights(tmp_path, shapes)
    assert "step-1: is of another model" in str(error_of(require_weights, tmp_path, {}))
    (tmp_path / "step-1" / "checkpoint.json").unlink()
    assert "none of 2 checkpoints is as it was written" in str(error_of(require_weights, tmp_path, shapes))
