"""`checkpoint.json`: all of a checkpoint but its tensors."""

import json
import math
import os
import pickle
import random

import pytest

from penstock.checkpoints import manifest
from penstock.checkpoints.manifest import MANIFEST, Manifest, UnreadableFormat, manifest_bytes, read_manifest
from penstock.errors import CheckpointError

NUM_FLIPS = 100


def small_manifest(**changes):
    return Manifest(
        **{
            "penstock": "0.1.0",
            "step": 50,
            "pipeline_steps": 100,
            "ranks": 1,
            "schedule": "1f1b",
            "extra": {"loss": math.inf, "text": "ü"},
            "random": [{}],
            "weights": {"w": {"dtype": "F32", "shape": [2], "file": "weights.safetensors"}},
            "optimizer": None,
            "files": {"weights.safetensors": {"num_bytes": 80, "sha256": "0" * 64}},
        }
        | changes
    )


def write(folder, content):
    (folder / MANIFEST).write_bytes(content)


def write_signed(folder, body):
    """Write text with a digest that is right, as anyone can."""
    write(folder, b'{"sha256":"' + manifest._digest(body) + b'","checkpoint":' + body + b"}\n")


def test_it_reads_back_as_it_was(tmp_path):
    write(tmp_path, manifest_bytes(small_manifest()))

    assert read_manifest(tmp_path) == small_manifest()
    assert json.loads((tmp_path / MANIFEST).read_bytes())["checkpoint"]["step"] == 50


def test_any_flipped_bit_is_found(tmp_path):
    content, chance = manifest_bytes(small_manifest()), random.Random(1)

    for _ in range(NUM_FLIPS):
        place, bit = chance.randrange(len(content)), chance.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        write(tmp_path, flipped)
        with pytest.raises(CheckpointError, match=r"checkpoint\.json: was changed or damaged"):
            read_manifest(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_file_that_is_cut_short_is_found(tmp_path, kept):
    write(tmp_path, manifest_bytes(small_manifest())[:kept])

    with pytest.raises(CheckpointError, match="was changed or damaged"):
        read_manifest(tmp_path)


def test_a_newer_format_is_told_from_damage(tmp_path):
    body = json.loads(manifest_bytes(small_manifest()))["checkpoint"] | {"version": 2, "penstock": "0.9.0", "other": 1}
    write_signed(tmp_path, json.dumps(body).encode())

    with pytest.raises(
        UnreadableFormat, match=r"has format penstock-checkpoint 2, written by Penstock 0\.9\.0; expected"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../../x", "/dev/zero", "a/b", "..", "", "a\0b"])
def test_a_wrong_key_and_a_file_outside_of_the_folder_are_refused(tmp_path, name):
    outside = "is not the name of a file in the same folder"
    for change, told in (
        ({"step": -1}, r"checkpoint\.json: step: Input should be greater"),
        ({"weights": {"w": {"dtype": "F32", "shape": [2], "file": name}}}, outside),
        ({"files": {name: {"num_bytes": 80, "sha256": "0" * 64}}}, outside),
    ):
        write_signed(tmp_path, json.dumps(small_manifest().model_dump() | change).encode())

        with pytest.raises(CheckpointError, match=told):
            read_manifest(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    path = tmp_path / MANIFEST
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)

    with pytest.raises(CheckpointError, match=r"checkpoint\.json: cannot be read: is not a regular file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b"[" * 100_000, b'{"a":' * 100_000, b"{", b"\xff"])
def test_text_that_is_no_object_is_refused(tmp_path, body):
    write_signed(tmp_path, body)

    with pytest.raises(CheckpointError, match=r"json: (holds .*; expected an object|cannot be read as JSON)"):
        read_manifest(tmp_path)


def test_a_folder_without_it_is_not_whole_and_one_of_pickles_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint\.json, which is written last"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="missing: there is no such folder"):
        read_manifest(tmp_path / "missing")
    (tmp_path / "model.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(UnreadableFormat, match=r"holds a pickle \(model\.pt\), which could run any code"):
        read_manifest(tmp_path)
