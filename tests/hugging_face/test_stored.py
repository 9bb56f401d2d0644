"""A tensor is read from its own bytes of a file, and a file that is not whole is refused by its header."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import CheckpointError
from penstock.hugging_face.stored import INDEX, WHOLE, stored_in, stored_in_folder

TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "narrow": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    "wide": torch.tensor([[1e300]], dtype=torch.float64),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 4),
}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "some.safetensors", metadata={"format": "pt"})
    return tmp_path / "some.safetensors"


def write(path, header, data=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


def test_every_type_and_shape_comes_back(path):
    found, _ = stored_in(path)

    assert found.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        tensor = found[name].read()
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape) == (found[name].dtype, tensor.shape)
        assert torch.equal(tensor, expected)
        assert found[name].num_bytes == expected.nbytes


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"[1, 2]", "its header is no JSON object"),
        (b"{not json", "its header is no JSON object"),
        ({"a": ENTRY | {"data_offsets": [0, 12]}}, "'a' is at the bytes 0 to 12 of 8, but has 8"),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, "'a' is at the bytes 4 to 12 of 8, but has 8"),
        ({"a": ENTRY | {"shape": [-2]}}, "the header has"),
        ({"a": ENTRY | {"shape": 2}}, "the header has"),
        ({"a": {"dtype": "F32"}}, "the header has {'dtype': 'F32'} for 'a'"),
        ({"a": [1]}, "the header has [1] for 'a'"),
        ({"a": ENTRY | {"dtype": "F8_E4M3"}}, "'a' has the type 'F8_E4M3'; expected F64, F32, F16, BF16"),
    ],
)
def test_a_header_that_says_something_else_is_refused(tmp_path, header, told):
    write(tmp_path / "bad.safetensors", header, bytes(8))

    with pytest.raises(CheckpointError) as caught:
        stored_in(tmp_path / "bad.safetensors")

    assert str(tmp_path / "bad.safetensors") in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q", (2**60).to_bytes(8, "little") + b"{}", None])
def test_a_file_that_is_cut_short_or_none_is_refused_and_allocates_nothing(path, content):
    found, _ = stored_in(path)
    last = max(found.values(), key=lambda each: each.begin + each.num_bytes)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="it ends 1 bytes too early"):
        last.read()

    path.unlink()
    if content is not None:
        path.write_bytes(content)
    told = "cannot be read .*: No such file" if content is None else "cannot be read as a safetensors file"
    with pytest.raises(CheckpointError, match=rf"some\.safetensors: {told}"):
        stored_in(path)


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


def test_of_a_name_that_two_files_have_the_index_says_which_counts_and_one_file_goes_before_an_index(tmp_path):
    save(tmp_path, first=["a", "b"], second=["a", "c"])
    for file in ("first", "second"):
        listed = {"a": f"{file}.safetensors", "c": "second.safetensors"}  # what a file has beside them is found too
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": "first.safetensors"} | listed}))
        assert stored_in_folder(tmp_path)[0]["a"].path == tmp_path / f"{file}.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "first.safetensors"}}))
    assert stored_in_folder(tmp_path)[0].keys() == {"a", "b"}

    save_file({"b": torch.ones(2)}, tmp_path / WHOLE)  # as in transformers
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
