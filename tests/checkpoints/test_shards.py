"""Files of tensors, and how damage to them is found."""

import errno
import os
import pickle
import random

import pytest
import torch

from penstock.checkpoints.shards import (
    DTYPE_NAMES,
    FileEntry,
    cannot_write,
    dtype_name,
    pickles_in,
    problem_of,
    read_tensors,
    record_of,
    shapes_of,
    write_shard,
)
from penstock.errors import CheckpointError

NUM_FLIPS = 100


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.safetensors"


def test_every_type_and_shape_comes_back(path):
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPE_NAMES}
    tensors |= {"number": torch.tensor(7), "nothing": torch.zeros(0, 4)}

    record = write_shard(path, tensors)

    found = read_tensors(path, tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert shapes_of(path) == {
        name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert record == record_of(path)
    assert problem_of(path, record) == ""


@pytest.mark.parametrize("rows", [range(1, 3), range(5), range(4, 5), range(5, 5), range(0)], ids=str)
def test_only_the_rows_that_are_asked_for_are_read(path, rows):
    whole = torch.arange(15.0).view(5, 3)
    write_shard(path, {"a": whole, "b": torch.ones(2)})

    found = read_tensors(path, ["a", "b"], {"a": rows})

    assert torch.equal(found["a"], whole[rows.start : rows.stop])
    assert torch.equal(found["b"], torch.ones(2))


def test_any_flipped_bit_is_found(path):
    record = write_shard(path, {"a": torch.randn(16), "b": torch.tensor(3)})
    content = path.read_bytes()
    chance = random.Random(0)

    for _ in range(NUM_FLIPS):
        place, bit = chance.randrange(len(content)), chance.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        assert problem_of(path, record).startswith(f"{path}: was changed or damaged: its sha256 is ")


def test_a_file_that_is_cut_or_gone_is_named(path):
    record = write_shard(path, {"a": torch.randn(16)})
    size = path.stat().st_size

    path.write_bytes(path.read_bytes()[:-1])
    assert problem_of(path, record) == f"{path}: has {size - 1} bytes, but {size} were written"
    path.unlink()
    assert problem_of(path, record) == f"{path}: is missing"
    path.mkdir()
    assert str(path) in problem_of(path, record)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.write_bytes(b""), r"file\.safetensors: cannot be read as a safetensors file"),
        (lambda path: path.write_bytes(b"x" * 100), r"file\.safetensors: cannot be read as a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_named_and_what_can_be_read_without_end_is_not_read(path, make, told):
    make(path)

    if "regular" in told:
        assert problem_of(path, FileEntry(num_bytes=0, sha256="")) == f"{path}: cannot be read: {told}"
    for read in (lambda: read_tensors(path, ["a"]), lambda: shapes_of(path)):
        with pytest.raises(CheckpointError, match=told):
            read()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.float8_e4m3fn)],
)
def test_a_tensor_without_a_place_is_named(tensor):
    with pytest.raises(CheckpointError, match=r"'w' is a .* which safetensors files cannot hold"):
        dtype_name("w", tensor)


def test_a_full_disk_is_told_from_the_words_of_the_library_and_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="missing/a: cannot be written: No such file or directory"):
        write_shard(tmp_path / "missing" / "a", {"a": torch.zeros(2)})
    words = "Error while serializing: I/O error: No space left on device (os error 28)"

    assert str(cannot_write(tmp_path, RuntimeError(words))) == (
        f"{tmp_path}: cannot be written: No space left on device. Free some space, or choose another folder"
    )
    assert "See to its permissions" in str(cannot_write(tmp_path, OSError(errno.EACCES, "x")))
    assert "something" in str(cannot_write(tmp_path, RuntimeError("something")))


def test_pickles_are_found_by_name_and_by_content(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".metadata").touch()
    (tmp_path / "weights.safetensors").write_bytes(pickle.dumps({"a": 1}))
    torch.save({}, tmp_path / "other")

    assert pickles_in(tmp_path) == [".metadata", "other", "weights.safetensors"]
    assert pickles_in(tmp_path, ["other"]) == [".metadata", "weights.safetensors"]
