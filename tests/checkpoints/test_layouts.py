"""Saved by ranks of any layout, loaded by those of any other: pipelines, replicas and shards, bit for bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penstock.checkpoints import weight_files
from penstock.checkpoints.loading import load_checkpoint
from penstock.checkpoints.pretrained import load_weights
from penstock.checkpoints.weight_files import save_weights
from penstock.checkpoints.writer import save_checkpoint
from tests.checkpoints.layouts import (
    Layout,
    adamw,
    fill,
    forget,
    kinds,
    known,
    main_adamw,
    num_tensors,
    run,
    stepped,
    uneven_layers,
    wrong,
)
from tests.train.local_ranks import small_layers

LAYOUTS = [
    Layout(1, 1),
    Layout(2, 1),
    Layout(1, 2),
    Layout(1, 2, is_sharded=True),
    Layout(2, 2),
    Layout(2, 2, is_sharded=True),
    Layout(1, 3, is_sharded=True),
]


def save(pipeline, folder, make_optimizer=adamw):
    optimizer = stepped(make_optimizer(pipeline.parameters()))
    fill(pipeline, optimizer)
    save_checkpoint(folder, pipeline, optimizer, step=1)
    return num_tensors(pipeline, optimizer)


def load_each(pipeline, folders, make_optimizer):
    """Load every folder into the same model, which forgets what it had, and a new optimizer."""
    found = {}
    expected = kinds(pipeline, stepped(make_optimizer(pipeline.parameters())))
    for name, folder in folders.items():
        forget(pipeline)
        optimizer = make_optimizer(pipeline.parameters())
        load_checkpoint(folder, pipeline, optimizer)
        assert kinds(pipeline, optimizer) == expected
        found[name] = wrong(pipeline, optimizer)
        count = num_tensors(pipeline, optimizer)
        stepped(optimizer)  # it takes what was loaded as its own
        assert kinds(pipeline, optimizer) == expected
    return found, count


@pytest.mark.feature("X27", "X51")
@pytest.mark.parametrize(
    ("dtype", "make_optimizer", "layouts"),
    [
        pytest.param(torch.float32, adamw, LAYOUTS, id="float32", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, main_adamw, [LAYOUTS[0], LAYOUTS[4], LAYOUTS[6]], id="main weights"),
    ],
)
def test_what_any_layout_saved_any_other_loads_bit_for_bit(tmp_path, dtype, make_optimizer, layouts):
    folders = {str(layout): tmp_path / str(layout) for layout in layouts}
    make_layers = partial(uneven_layers, dtype)
    for layout in layouts:
        run(layout, save, folders[str(layout)], make_optimizer, make_layers=make_layers)

    for layout in layouts:
        for found, count in run(layout, load_each, folders, make_optimizer, make_layers=make_layers):
            assert found == {name: [] for name in folders}, layout
            assert count > (7 + 3 * 4) * 4 / layout.pipeline - 1
    for folder in folders.values():
        assert_each_tensor_is_in_one_file(folder / "step-1", dtype)


def assert_each_tensor_is_in_one_file(folder, dtype):
    files = [load_file(path) for path in sorted(folder.glob("weights-*.safetensors"))]
    names = [name for file in files for name in file]
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert len(names) == len(found) == 7 * 4
    for name, tensor in found.items():
        assert tensor.dtype in (dtype, torch.float32, torch.int64)
        assert torch.equal(tensor, known(f"{name}:", tensor.shape, tensor.dtype)), name


class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.tensor(2.0))


def test_a_model_of_single_numbers_is_told_from_the_counts_of_its_optimizer(tmp_path):
    def make_layers():
        return [Number(), Number()]

    run(Layout(1, 1), save, tmp_path, make_layers=make_layers)

    for found, count in run(Layout(1, 2, is_sharded=True), load_each, {"": tmp_path}, adamw, make_layers=make_layers):
        assert (found, count) == ({"": []}, 8)


WEIGHTS = [Layout(2, 1), Layout(2, 2), Layout(2, 2, is_sharded=True)]


def save_own_weights(pipeline, folder):
    fill(pipeline)
    save_weights(folder, pipeline)


def load_own_weights(pipeline, path):
    forget(pipeline)
    load_weights(path, pipeline)
    return wrong(pipeline)


@pytest.mark.parametrize("file_bytes", [weight_files.FILE_BYTES, 200], ids=["one file", "files of an index"])
@pytest.mark.parametrize("layout", WEIGHTS, ids=str)
def test_weights_alone_are_saved_and_loaded_by_any_layout(tmp_path, monkeypatch, layout, file_bytes):
    monkeypatch.setattr(weight_files, "FILE_BYTES", file_bytes)

    run(layout, save_own_weights, tmp_path)

    assert (tmp_path / weight_files.WHOLE).exists() == (file_bytes > 200)
    for other in WEIGHTS:
        assert run(other, load_own_weights, tmp_path) == [[]] * other.pipeline * other.data


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("dualpipe", Layout(2, 2)),
        ("tied", Layout(2, 2)),
        pytest.param("dualpipe", Layout(2, 2, is_sharded=True), marks=pytest.mark.slow),
        pytest.param("tied", Layout(2, 2, is_sharded=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tied_parameters_and_two_routes_are_saved_once_and_loaded_into_every_copy(tmp_path, layout, schedule):
    tied_head = schedule == "tied"
    layout = replace(layout, schedule="1f1b" if tied_head else schedule)
    make_layers = partial(small_layers, tied_head=tied_head)

    run(layout, save, tmp_path, make_layers=make_layers)

    for other in (layout, Layout(1, 1), Layout(1, 2, is_sharded=True)):
        for found, _ in run(other, load_each, {"": tmp_path}, adamw, make_layers=make_layers):
            assert found == {"": []}
