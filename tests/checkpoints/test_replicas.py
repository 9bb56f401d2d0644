"""Replicas save together: what each writes, and what becomes of an error of one."""

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penstock.checkpoints import loading, shards, staging
from penstock.checkpoints.loading import load_checkpoint
from penstock.checkpoints.manifest import read_manifest
from penstock.checkpoints.pretrained import load_weights
from penstock.checkpoints.weight_files import save_weights
from penstock.checkpoints.writer import CheckpointWriter, save_checkpoint
from penstock.errors import CheckpointError, NotSaved
from penstock.pipeline import Pipeline
from tests.checkpoints.layouts import Layout, adamw, fill, forget, run, stepped, uneven_layers
from tests.support.local_pipelines import error_of
from tests.support.mesh_pipelines import Job, on_mesh

SHARDED = Layout(2, 2, is_sharded=True)
BOTH = [Layout(2, 2), SHARDED]


def equal_layers():
    return [nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)) for _ in range(8)]


def save_of(pipeline, folder, step=1):
    optimizer = stepped(adamw(pipeline.parameters()))
    fill(pipeline, optimizer)
    checkpoints = CheckpointWriter(folder, pipeline, optimizer, asynchronous=False)
    checkpoints.save(step)
    return checkpoints._staging.num_bytes


@pytest.mark.feature("X30")
@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(1, 4, is_sharded=True)], ids=str)
def test_every_rank_holds_and_writes_an_equal_share(tmp_path, layout):
    staged = run(layout, save_of, tmp_path, make_layers=equal_layers)

    num_ranks = layout.pipeline * layout.data
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / "step-1").glob(f"*-{rank + 1:05d}-of-*"))
        for rank in range(num_ranks)
    ]
    share = sum(sizes) / num_ranks
    assert max(sizes) < 1.1 * share
    assert max(staged) < 1.1 * sum(staged) / num_ranks


def hide_all_but(path, names):
    """Overwrite the bytes of a file's other tensors."""
    content = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:data]).items():
        if name != "__metadata__" and name not in names:
            begin, end = (data + offset for offset in entry["data_offsets"])
            content[begin:end] = b"\xff" * (end - begin)
    path.write_bytes(content)


@pytest.mark.feature("X30")
@pytest.mark.parametrize("layout", BOTH, ids=str)
def test_a_layer_is_read_without_the_files_and_the_bytes_of_others(tmp_path, layout):
    run(layout, save_of, tmp_path)
    folder = tmp_path / "step-1"
    manifest = read_manifest(folder)
    entries = {name: entry for name, entry in manifest.weights.items() if name.startswith("2.")}
    for name in entries.keys() & manifest.optimizer.state.keys():
        entries |= {f"{name}:{key}": entry for key, entry in manifest.optimizer.state[name].tensors.items()}
    files = {name: folder / entry.file for name, entry in entries.items()}
    expected = shards.read_files(files, {})

    for path in folder.iterdir():
        if path not in files.values():
            path.unlink()
        else:
            hide_all_but(path, entries)

    assert len(expected) > 7
    found = shards.read_files(files, {})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def train(places, folder, steps, is_first, options):
    """Train from the checkpoint that is there, unless it is the first part; save, and return what this rank has."""
    job = Job([32 // places.num_replicas] * places.num_replicas)
    microbatches = 8 // places.num_replicas
    with Pipeline(job.make_layers(), "1f1b", microbatches, job.loss, mesh=places, **options) as pipeline:
        optimizer = adamw(pipeline.parameters())
        if not is_first:
            load_checkpoint(folder, pipeline, optimizer)
        inputs, target = job.of(pipeline.replica)
        losses = []
        for _ in range(steps):
            losses.append(pipeline.step(inputs, target=target).loss.item())
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(folder, pipeline, optimizer, step=pipeline.step_number)
    return losses


def trained_weights(folder):
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
        if not name.endswith(":step")
    }


@pytest.mark.slow
@pytest.mark.feature("X27")
def test_a_training_with_shards_continues_on_every_layout(tmp_path):
    shard = "full"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_mesh(2, 2, train, whole, 4, True, {"shard": shard})
    on_mesh(2, 2, train, parts, 2, True, {"shard": shard})
    expected = trained_weights(whole / "step-4")

    for pipeline, data, options in [(2, 2, {"shard": shard}), (1, 4, {"shard": shard}), (2, 2, {}), (1, 1, {})]:
        on_mesh(pipeline, data, train, parts, 2, False, options)
        found = trained_weights(parts / "step-4")
        assert found.keys() == expected.keys()
        if (pipeline, data, options) == (2, 2, {"shard": shard}):
            assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-13)
        shutil.rmtree(parts / "step-4")


@pytest.mark.parametrize(
    ("save", "options"), [(save_checkpoint, {"step": 1}), (save_weights, {})], ids=["checkpoint", "weights"]
)
def test_a_rank_without_memory_is_one_error_on_all_and_nothing_is_written(tmp_path, monkeypatch, save, options):
    def case(pipeline):
        def fail(device):
            if threading.get_ident() == last:
                raise NotSaved("no memory")

        last = pipeline.control.all_gather_object(threading.get_ident())[-1]
        monkeypatch.setattr(staging, "synchronize", fail)
        pipeline.control.all_gather_object(None)
        return str(error_of(lambda: save(tmp_path, pipeline, **options)))

    assert run(SHARDED, case) == ["rank 3 (pipeline 1, data 1): no memory"] * 3 + ["no memory"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", BOTH, ids=str)
def test_replicas_that_hold_other_state_are_refused_on_all_ranks(tmp_path, layout):
    def case(pipeline):
        optimizer = adamw(pipeline.parameters())
        if pipeline.control.rank != 3:
            stepped(optimizer)
        return str(error_of(lambda: save_checkpoint(tmp_path, pipeline, optimizer, step=1)))

    assert (
        run(layout, case)
        == [
            "rank 3 (pipeline 1, data 1) has another state of the optimizer than rank 1 (pipeline 1, data 0), which "
            "holds the same stages; let all replicas make their layers and optimizers alike"
        ]
        * 4
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layout", "load"),
    [(Layout(2, 2), load_checkpoint), (SHARDED, load_weights)],
    ids=["2x2-load_checkpoint", "2x2 shards-load_weights"],
)
def test_a_model_with_other_rows_is_refused_and_nothing_is_changed(tmp_path, layout, load):
    run(layout, save_of, tmp_path)

    def case(pipeline):
        forget(pipeline)
        error = error_of(load, tmp_path, pipeline)
        locals_ = [held.to_local() if hasattr(held, "to_local") else held for held in pipeline.state_dict().values()]
        return type(error), str(error), all((local == 1).all() for local in locals_)

    for kind, text, is_unchanged in run(layout, case, make_layers=lambda: uneven_layers(num_rows=6)):
        assert kind is CheckpointError
        assert ".matrix'" in text
        assert "(5, 3)" in text
        assert "(6, 3)" in text
        assert is_unchanged


def test_a_file_that_vanishes_while_it_is_read_is_one_error_on_all(tmp_path, monkeypatch):
    run(SHARDED, save_of, tmp_path)
    read_tensors = shards.read_tensors

    def vanish(path, names, rows):
        if "weights-00004-" in path.name:
            raise CheckpointError(f"{path.name}: is gone")
        return read_tensors(path, names, rows)

    monkeypatch.setattr(shards, "read_tensors", vanish)

    def case(pipeline):
        forget(pipeline)
        error = error_of(lambda: load_checkpoint(tmp_path, pipeline))
        return str(error).partition(": ")[2] or str(error)

    assert all("is gone" in text for text in run(SHARDED, case))


@pytest.mark.parametrize(
    ("layout", "is_restored"),
    [(Layout(1, 2, is_sharded=True), True), (Layout(1, 2), True), (Layout(2, 1), False)],
    ids=str,
)
def test_random_numbers_continue_on_a_mesh_of_the_same_shape(tmp_path, monkeypatch, layout, is_restored):
    run(Layout(1, 2), save_of, tmp_path)
    restored = []
    monkeypatch.setattr(loading, "random_state_restorer", lambda state, device: lambda: restored.append(state))

    run(layout, lambda pipeline: load_checkpoint(tmp_path, pipeline) and None)

    manifest = read_manifest(tmp_path / "step-1")
    assert (manifest.ranks, manifest.replicas) == (2, 2)
    assert len(restored) == 2 * is_restored


def test_only_the_rows_that_a_rank_needs_are_read(tmp_path, monkeypatch):
    run(SHARDED, save_of, tmp_path, make_layers=equal_layers)
    read, lock, read_tensors = [], threading.Lock(), shards.read_tensors

    def count(path, names, rows):
        found = read_tensors(path, names, rows)
        with lock:
            read.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    monkeypatch.setattr(shards, "read_tensors", count)

    def case(pipeline):
        load_checkpoint(tmp_path, pipeline, adamw(pipeline.parameters()))

    run(SHARDED, case, make_layers=equal_layers)
    total = sum(path.stat().st_size for path in tmp_path.glob("step-1/*.safetensors"))
    assert sum(read) < total  # each row by one rank; with replicas that hold all it would be twice as much
