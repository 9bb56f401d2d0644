"""Loading into any number of ranks, schedule, split and placement."""

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.checkpoints.loading import load_checkpoint, local_weights_of
from penstock.checkpoints.manifest import MANIFEST, manifest_bytes, read_manifest
from penstock.checkpoints.writer import save_checkpoint
from penstock.errors import CheckpointError, PenstockWarning
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.checkpoints.layouts import Layout, fill, forget, run, stepped, wrong
from tests.checkpoints.training import adamw, assert_equal, train, train_on
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.local_ranks import on_small_pipelines, small_layers, small_pipeline


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Losses and weights of six steps on 4 ranks, and a folder with the checkpoint of the third."""
    folder = tmp_path_factory.mktemp("saved")
    train_on(4, 0, 3, save=folder)
    return *train_on(4, 0, 6)[:2], folder


@pytest.mark.feature("X27", "X51")
@pytest.mark.parametrize(
    ("num_ranks", "options"), [(1, {}), (2, {"schedule": "zbv"}), (3, {"split": [5, 1, 1]})], ids=str
)
def test_what_4_ranks_saved_continues_on_any_schedule_and_split_bit_for_bit(trained, num_ranks, options):
    losses, weights, folder = trained

    found, continued, extra = train_on(num_ranks, 3, 6, load=folder, **options)

    assert extra == {"at": 3}
    assert found == losses[3:]
    assert_equal(continued, weights)


class Dropping(nn.Module):
    """Random numbers, and running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(self.norm(x)))


@pytest.mark.parametrize("options", [{}, {"seed": 7}], ids=["the process's", "by step"])
def test_random_numbers_and_statistics_continue(tmp_path, options):
    torch.manual_seed(0)
    layers = [Dropping(), Dropping()]
    pipeline = Pipeline(layers, "gpipe", 2, nn.functional.mse_loss, **options)
    optimizer = adamw(pipeline.parameters())

    def steps(count):
        losses = []
        for step in range(count):
            batch = torch.full((4, 4), step + 1.0) + torch.arange(16.0).reshape(4, 4)
            losses.append(pipeline.step(batch, target=torch.zeros(4, 4)).loss.item())
            optimizer.step(), optimizer.zero_grad()
        return losses, random.random()

    steps(2)
    save_checkpoint(tmp_path, pipeline, optimizer, step=2)
    expected = steps(3)
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}

    load_checkpoint(tmp_path, pipeline, optimizer)

    assert pipeline.step_number == 2
    assert steps(3) == expected
    assert_equal(pipeline.state_dict(), state)
    pipeline.close()


def refused(folder, layers=None):
    """Return the message with which loading is refused, the same on all ranks; nothing is changed by it."""

    def case(pipeline):
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        stepper = adamw(pipeline.parameters())
        error = error_of(lambda: load_checkpoint(folder, pipeline, stepper))
        assert isinstance(error, CheckpointError), error
        assert_equal(pipeline.state_dict(), before)
        assert not stepper.state
        return str(error)

    messages = on_small_pipelines(2, case, layers)
    return messages[0].removeprefix("rank 0: ").removeprefix("rank 1: ")


def test_a_damaged_one_is_named_in_a_warning_and_the_older_one_loaded(folder):
    (folder / "step-2" / MANIFEST).unlink()
    pipeline = small_pipeline(None)

    with pytest.warns(PenstockWarning, match=r"step-2: holds no checkpoint\.json.*step-1 is loaded instead"):
        assert ps.load_checkpoint(folder, pipeline, adamw(pipeline.parameters())) == {"at": 1}
    pipeline.close()


def test_a_model_with_other_layers_or_types_is_refused_and_not_rounded(folder):
    more = [LayerSpec("last", nn.Identity), LayerSpec("more", lambda: nn.Linear(2, 2))]
    rounded = "'embedding.weight' is F32 (32, 16) in it, but F64 (32, 16) in the model"

    assert "step-2: is of another model, which also has 'head.weight', 'norm.weight'" in refused(
        folder, small_layers()[:-2]
    )
    assert "step-2: is of another model: it has no 'more.bias', 'more.weight'" in refused(
        folder, [*small_layers(), *more]
    )
    assert f"is of another model: {rounded}" in refused(folder, small_layers("float64"))


def test_weights_alone_may_be_loaded(folder):
    _, weights, _ = train_on(2, 0, 2)
    pipeline = small_pipeline(None)

    ps.load_checkpoint(folder / "step-2", pipeline)

    assert_equal(pipeline.state_dict(), weights)
    ps.save_checkpoint(folder / "weights", pipeline, step=0)
    assert "was saved without an optimizer" in refused(folder / "weights")
    pipeline.close()


def test_random_numbers_that_are_none_are_refused_before_weights_change(tmp_path):
    train_on(2, 0, 2, save=tmp_path)
    manifest = read_manifest(tmp_path / "step-2")
    manifest.random[-1] = {}
    (tmp_path / "step-2" / MANIFEST).write_bytes(manifest_bytes(manifest))

    def case(pipeline):
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        error = error_of(lambda: load_checkpoint(tmp_path, pipeline))
        assert_equal(dict(pipeline.state_dict()), before)
        return error

    errors = on_small_pipelines(2, case)
    assert all("step-2: `random` is not what generators" in str(error) for error in errors)


def test_another_reader_of_such_files_reads_the_weights(tmp_path):
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    transport = on_ranks(1, lambda wires: wires)[0]
    _, weights, _ = train(transport, 0, 1, save=tmp_path)
    found = {name: torch.zeros_like(value) for name, value in weights.items()}

    load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step-1")), no_dist=True)

    assert_equal(found, weights)


def test_a_path_that_is_not_utf8_saves_and_loads(tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    _, weights, _ = train_on(2, 0, 2, save=folder)

    _, found, extra = train_on(2, 2, 2, load=folder)

    assert_equal(found, weights)
    assert extra == {"at": 2}


def rows_of_tensors(pipeline):
    weights = local_weights_of(pipeline)
    return weights.rows(), sorted(weights.saved_names.values())


def test_a_rank_with_shards_reads_its_rows_and_whole_buffers():
    first, second = run(Layout(1, 2, is_sharded=True), rows_of_tensors)

    of_first_layer = {name: rows for name, rows in first[0].items() if name.startswith("0.")}
    assert of_first_layer == {
        "0.matrix": range(3),
        "0.row": range(1),
        "0.none": range(0),
        "0.frozen": range(4),
    }
    assert {name: second[0][name] for name in of_first_layer} == {
        "0.matrix": range(3, 5),
        "0.row": range(1, 1),
        "0.none": range(0),
        "0.frozen": range(4, 7),
    }
    assert first[1] == second[1]
    assert {"0.scale", "0.running", "0.count"} <= set(first[1])


class Other(torch.nn.Linear):
    def get_extra_state(self):
        return 3

    def set_extra_state(self, state): ...


def test_what_is_no_tensor_on_one_rank_is_one_error_on_all():
    def case(pipeline):
        return str(error_of(local_weights_of, pipeline)), type(error_of(local_weights_of, pipeline))

    found = run(Layout(2, 1), case, make_layers=lambda: [torch.nn.Linear(2, 2), Other(2, 2)])

    words = "'1._extra_state' is a int, which is no tensor; save it in `extra`"
    assert found == [(f"rank 1: {words}", CheckpointError), (words, CheckpointError)]


# ---- ranks without an optimizer, such as those without trained parameters


def optimizer_on(pipeline, ranks):
    """Return an optimizer that has made a step, on ranks at these places along the pipeline; None on others."""
    return stepped(adamw(pipeline.parameters())) if pipeline.rank in ranks else None


@pytest.mark.parametrize(
    ("layout", "saving", "loading"),
    [
        (Layout(2), {0}, {0}),
        (Layout(4), {1}, {1}),
        (Layout(2, 2), {0, 1}, {1}),
        (Layout(2, 2, is_sharded=True), {0, 1}, {0}),
        (Layout(2), {1}, ()),
    ],
    ids=str,
)
def test_an_optimizer_on_some_ranks_is_saved_and_loaded_and_the_next_calls_run(tmp_path, layout, saving, loading):
    def case(pipeline):
        optimizer = optimizer_on(pipeline, saving)
        fill(pipeline, optimizer)
        save_checkpoint(tmp_path, pipeline, optimizer, step=1)
        forget(pipeline)
        again = optimizer_on(pipeline, loading)
        load_checkpoint(tmp_path, pipeline, again)
        # The ranks are at one place: what comes next, of whichever kind, meets the same call of the others.
        norm, state = float(pipeline.clip_grad_norm_(1.0)), pipeline.state_dict(on_rank=0)
        save_checkpoint(tmp_path, pipeline, again, step=2)
        return wrong(pipeline, again), norm, len(state)

    found = run(layout, case)
    assert [names for names, *_ in found] == [[]] * len(found)
    assert [num_names > 0 for *_, num_names in found] == [True] + [False] * (len(found) - 1)


def test_an_optimizer_on_a_rank_that_had_none_is_refused_on_all(tmp_path):
    def case(pipeline):
        save_checkpoint(tmp_path, pipeline, optimizer_on(pipeline, {0}), step=1)
        error = error_of(load_checkpoint, tmp_path, pipeline, optimizer_on(pipeline, {0, 1}))
        return str(error), float(pipeline.clip_grad_norm_(1.0))

    found = run(Layout(2), case)
    assert all("AdamW held no parameter '2.matrix'" in words for words, _ in found)
    assert len({norm for _, norm in found}) == 1
