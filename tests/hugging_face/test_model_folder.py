"""A folder's weights are those of its one file, or of its index; never those of a pickle."""

import json

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import CheckpointError
from penstock.hugging_face.model_folder import INDEX, WHOLE, stored_in_folder


def save(folder, **files):
    """Write files of tensors of one value, and the index that lists them."""
    for name, tensors in files.items():
        save_file({each: torch.ones(2) for each in tensors}, folder / f"{name}.safetensors")
    listed = {each: f"{name}.safetensors" for name, tensors in files.items() for each in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        stored_in_folder(folder)
    return str(caught.value)


def test_an_index_names_the_files_and_a_file_that_it_does_not_name_is_not_opened(tmp_path):
    save(tmp_path, first=["a", "b"], second=["c"])
    (tmp_path / "third.safetensors").write_bytes(b"damaged")

    found, num_bytes = stored_in_folder(tmp_path)

    assert {name: stored.path.name for name, stored in found.items()} == {
        "a": "first.safetensors",
        "b": "first.safetensors",
        "c": "second.safetensors",
    }
    data = sum(stored.num_bytes for stored in found.values())
    files = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    assert num_bytes == sum(path.stat().st_size for path in files) - data


def test_what_a_file_holds_beside_the_index_is_found_too(tmp_path):
    save(tmp_path, first=["a", "b"])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "first.safetensors"}}))

    assert stored_in_folder(tmp_path)[0].keys() == {"a", "b"}


def test_of_a_name_that_two_files_have_the_index_says_which_counts(tmp_path):
    save(tmp_path, first=["a", "b"], second=["a", "c"])
    for file in ("first", "second"):
        listed = {"a": f"{file}.safetensors", "b": "first.safetensors", "c": "second.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))

        assert stored_in_folder(tmp_path)[0]["a"].path == tmp_path / f"{file}.safetensors"


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path):
    save(tmp_path, first=["a"])
    save_file({"b": torch.ones(2)}, tmp_path / WHOLE)

    assert stored_in_folder(tmp_path)[0].keys() == {"b"}


def test_an_index_that_lists_what_a_file_lacks_is_refused(tmp_path):
    save(tmp_path, first=["norm.weight"], second=["norm.wieght"])
    listed = {"norm.weight": "second.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))

    told = refused(tmp_path)

    assert f"{tmp_path}/second.safetensors: has no 'norm.weight', which {INDEX} lists there" in told
    assert "Did you mean 'norm.wieght'?" in told


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_text(content)

    assert f"{tmp_path / INDEX}: cannot be read as an index of weights" in refused(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    assert f"{tmp_path}: holds no weights; expected {WHOLE}, or {INDEX}. Save the model" in refused(tmp_path)

    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "Its pytorch_model.bin is not read: a pickle can run any code" in refused(tmp_path)

    assert "none: there is no such folder; expected one with" in refused(tmp_path / "none")
