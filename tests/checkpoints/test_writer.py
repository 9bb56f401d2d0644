"""Saving: what is written, when it counts, and what becomes of errors."""

import errno
import json
import os
import re
import shutil
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoints import writer
from penstock.checkpoints.loading import load_checkpoint
from penstock.checkpoints.manifest import read_manifest
from penstock.checkpoints.shards import write_shard
from penstock.checkpoints.weight_files import save_weights
from penstock.checkpoints.writer import INDEX, CheckpointWriter, save_checkpoint
from penstock.errors import CheckpointError, NotSaved, PenstockWarning, PipelineError
from tests.checkpoints.training import adamw, assert_equal, train_on
from tests.checkpoints.written_files import names
from tests.support.local_pipelines import error_of
from tests.support.ranks import run_ranks_with_deaths
from tests.train.local_ranks import on_small_pipelines, random_batch, small_layers, small_pipeline


def step_with(pipeline, optimizer, seed=0):
    inputs, target = random_batch(seed)
    pipeline.step(inputs, target=target)
    optimizer.step()
    optimizer.zero_grad()


def save_all(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step)
    checkpoints.finish()


@pytest.fixture
def on_one_rank():
    """Make a pipeline, its optimizer and their writer of checkpoints; they are closed behind the test."""
    with ExitStack() as pipelines:

        def make(folder, **options):
            pipeline = pipelines.enter_context(small_pipeline(None))
            optimizer = adamw(pipeline.parameters())
            return pipeline, optimizer, CheckpointWriter(folder, pipeline, optimizer, **options)

        yield make


@pytest.fixture
def gate(monkeypatch):
    """Files are written when this event is set."""
    event = threading.Event()

    def write_late(path, tensors):
        assert event.wait(20)
        return write_shard(path, tensors)

    monkeypatch.setattr(writer, "write_shard", write_late)
    yield event
    event.set()


@pytest.mark.feature("X30", "X50")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_rank_writes_its_own_tensors_under_the_unsplit_models_names_and_the_index_lists_them(tmp_path, num_ranks):
    _, weights, _ = train_on(num_ranks, 0, 2, save=tmp_path)

    folder = tmp_path / "step-2"
    shards = [load_file(path) for path in sorted(folder.glob("weights-*.safetensors"))]
    assert len(shards) == num_ranks
    assert_equal({name: tensor for shard in shards for name, tensor in shard.items()}, weights)
    assert sum(map(len, shards)) == len(weights)
    moments = [name for path in folder.glob("optimizer-*") for name in load_file(path)]
    assert sorted(moments) == sorted(f"{name}:{key}" for name in weights for key in ("exp_avg", "exp_avg_sq", "step"))
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())
    assert INDEX in read_manifest(folder).files


def test_a_later_step_does_not_reach_the_files(tmp_path, gate, on_one_rank):
    pipeline, optimizer, checkpoints = on_one_rank(tmp_path)
    step_with(pipeline, optimizer)
    expected = {name: value.clone() for name, value in pipeline.state_dict().items()}

    checkpoints.save(1)
    step_with(pipeline, optimizer)
    gate.set()
    checkpoints.finish()

    load_checkpoint(tmp_path, pipeline, optimizer)
    assert_equal(pipeline.state_dict(), expected)
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_a_save_returns_before_the_files_are_written_and_one_is_in_flight(tmp_path, gate):
    def case(pipeline):
        checkpoints = CheckpointWriter(tmp_path, pipeline)
        checkpoints.save(1)
        for _ in range(3):
            checkpoints.poll()
        announced = [(tmp_path / "step-1").exists()]
        gathered = pipeline.control.all_gather_object(None)
        gate.set()
        checkpoints.save(2)  # waits for the first
        announced.append((tmp_path / "step-1").exists())
        is_finished = checkpoints.finish()
        announced.append((tmp_path / "step-2").exists())
        return len(gathered), announced, is_finished

    assert on_small_pipelines(2, case) == [(2, [False, True, True], True)] * 2


def test_polling_announces_what_is_written(tmp_path):
    def case(pipeline):
        checkpoints = CheckpointWriter(tmp_path, pipeline)
        checkpoints.save(1)
        for _ in range(2000):
            checkpoints.poll()
            if pipeline.control.all_gather_object((tmp_path / "step-1").exists()) == [True, True]:
                break
            time.sleep(0.005)

    on_small_pipelines(2, case)
    assert names(tmp_path) == ["step-1"]


def test_a_wait_with_a_limit_ends_with_it(tmp_path, gate):
    def case(pipeline):
        checkpoints = CheckpointWriter(tmp_path, pipeline)
        checkpoints.save(1)
        return checkpoints.finish(limit_s=0.2)

    assert on_small_pipelines(2, case) == [False, False]


def test_a_disk_that_never_answers_is_an_error_on_all_ranks(tmp_path, gate, monkeypatch):
    def case(pipeline):
        checkpoints = CheckpointWriter(tmp_path, pipeline)
        checkpoints.save(1)
        return error_of(checkpoints.finish)

    monkeypatch.setattr(writer, "longest_s", lambda num_bytes: 0.1)
    errors = on_small_pipelines(2, case)

    assert [type(error) for error in errors] == [NotSaved] * 2
    assert all("a disk took more than 0 s for it. See to it" in str(error) for error in errors)


def test_an_index_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path, gate):
    def case(pipeline):
        checkpoints = CheckpointWriter(tmp_path, pipeline)
        checkpoints.save(1)
        if pipeline.control.rank == 0:
            next(tmp_path.glob("*.partial")).joinpath(INDEX).mkdir()
            gate.set()
        return error_of(checkpoints.finish)

    errors = on_small_pipelines(2, case)

    assert [type(error) for error in errors] == [NotSaved] * 2
    assert all(f"{INDEX}: cannot be written: Is a directory" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.feature("X27")
def test_a_slow_disk_may_take_longer_than_the_deadline(tmp_path, monkeypatch):
    def write_late(path, tensors):
        time.sleep(2.5)
        return write_shard(path, tensors)

    monkeypatch.setattr(writer, "write_shard", write_late)
    on_small_pipelines(2, lambda pipeline: save_checkpoint(tmp_path, pipeline, step=1), deadline_s=1.0)

    assert names(tmp_path) == ["step-1"]


def test_an_error_of_one_ranks_thread_is_raised_by_the_next_call_on_all(tmp_path, monkeypatch):
    def fail_on_second(path, tensors):
        if "-00002-" in path.name:
            raise NotSaved(f"{path.name}: cannot be written: No space left on device")
        return write_shard(path, tensors)

    def case(pipeline):
        checkpoints = CheckpointWriter(tmp_path, pipeline)
        checkpoints.save(1)
        first = error_of(lambda: checkpoints.save(2))
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write_shard", write_shard)
            pipeline.control.all_gather_object(None)
            checkpoints.save(2)
            checkpoints.finish()
        return first

    monkeypatch.setattr(writer, "write_shard", fail_on_second)
    first, second = on_small_pipelines(2, case)

    assert str(second) == "weights-00002-of-00002.safetensors: cannot be written: No space left on device"
    assert str(first) == f"rank 1: {second}"
    assert (tmp_path / "step-2").exists()
    assert names(tmp_path) == ["step-2"], "what was written of the other one is gone"


@pytest.mark.parametrize(
    ("step", "extra", "words"),
    [
        (-1, {}, "step: -1 of type int; expected a whole number"),
        (1.5, {}, "step: 1.5 of type float"),
        (1, {"x": torch.zeros(1)}, "`extra` is not JSON: Object of type Tensor"),
        (1, {"x": {3: 4}}, "`extra` has a key that is not text"),
    ],
)
def test_what_can_not_be_saved_is_refused_before_anything_is_written(tmp_path, step, extra, words, on_one_rank):
    _, _, checkpoints = on_one_rank(tmp_path / "new")

    with pytest.raises(CheckpointError, match=words):
        checkpoints.save(step, extra)

    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("what", "values"), [("step", (1, 2)), ("`extra`", ({"a": 1}, {"a": 2}))])
def test_what_differs_between_ranks_is_refused(tmp_path, what, values):
    def case(pipeline):
        given = values[pipeline.transport.rank]
        step, extra = (given, {}) if what == "step" else (1, given)
        return str(error_of(save_checkpoint, tmp_path, pipeline, step=step, extra=extra))

    told = f"{tmp_path}: rank 1 has another {what} than rank 0; pass the same to all ranks"
    assert on_small_pipelines(2, case) == [told] * 2


def test_a_checkpoint_is_not_written_over_unless_it_is_damaged(tmp_path, on_one_rank):
    pipeline, optimizer, checkpoints = on_one_rank(tmp_path, asynchronous=False)
    checkpoints.save(1)

    with pytest.raises(CheckpointError, match="step-1: exists already"):
        checkpoints.save(1)
    (tmp_path / "step-1" / INDEX).write_text("{}")
    checkpoints.save(1)

    assert "step-1.damaged-1" in names(tmp_path)
    assert load_checkpoint(tmp_path, pipeline, optimizer) == {}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_all_files_follow_the_umask(tmp_path, umask, mode, on_one_rank):
    pipeline, optimizer, checkpoints = on_one_rank(tmp_path)
    step_with(pipeline, optimizer)
    before = os.umask(umask)
    try:
        save_all(checkpoints, 1)
        save_weights(tmp_path, pipeline)
    finally:
        os.umask(before)

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: mode for path in files}
    assert len(files) == 5


def test_the_last_ones_stay(tmp_path, on_one_rank):
    pipeline, optimizer, checkpoints = on_one_rank(tmp_path, keep_last=2, keep_every=3)
    save_all(checkpoints, *range(1, 7))
    assert names(tmp_path) == ["step-3", "step-5", "step-6"]

    save_checkpoint(tmp_path, pipeline, optimizer, step=7, keep=2)
    assert names(tmp_path) == ["step-6", "step-7"]
    save_checkpoint(tmp_path, pipeline, optimizer, step=8)
    assert names(tmp_path) == ["step-6", "step-7", "step-8"]


@pytest.mark.parametrize(
    ("folder", "options", "told"),
    [
        ("file/in", {}, r"/file/in: cannot be written: Not a directory"),
        *(
            ("new", {"keep": keep}, "^keep: .*; expected a number of checkpoints, or 0 for all")
            for keep in (-1, True, 1.5, "3", None)
        ),
    ],
)
def test_a_folder_and_a_number_to_keep_that_are_none_are_refused_before_anything_is_written(
    tmp_path, folder, options, told
):
    (tmp_path / "file").touch()

    def case(pipeline):
        return error_of(save_checkpoint, tmp_path / folder, pipeline, step=1, **options)

    errors = on_small_pipelines(2, case)
    assert [type(error) for error in errors] == [NotSaved] * 2
    assert re.search(told, str(errors[0]))
    assert names(tmp_path) == ["file"]


def test_an_old_one_that_cannot_be_removed_is_warned_of_once_and_ends_nothing(tmp_path, monkeypatch, on_one_rank):
    _, _, checkpoints = on_one_rank(tmp_path, keep_last=1)

    def refuse(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(PenstockWarning) as warned:
        save_all(checkpoints, 1, 2, 3)
    monkeypatch.undo()

    assert re.match(rf"{tmp_path}/step-1\.\w+\.partial: cannot be removed: Directory not empty", str(warned[0].message))
    assert len(warned) == 1
    assert checkpoints.folder.steps() == [3]
    save_all(checkpoints, 4)
    assert checkpoints.folder.steps() == [4]


def test_what_was_just_saved_stays_where_there_are_later_steps(tmp_path, on_one_rank):
    pipeline, _, checkpoints = on_one_rank(tmp_path)
    save_all(checkpoints, 98, 99, 100)

    set_back = CheckpointWriter(tmp_path, pipeline, keep_last=2)
    with pytest.warns(PenstockWarning, match="step-100 is of a later step than 60, which is saved now") as warned:
        save_all(set_back, 60, 70, 80)

    assert len(warned) == 1
    assert names(tmp_path) == ["step-100", "step-70", "step-80", "step-98", "step-99"]


def die_before_announcing(rank, folder):
    pipeline = small_pipeline(None, small_layers(), deadline_s=5.0)
    save_checkpoint(folder, pipeline, step=1)
    checkpoints = CheckpointWriter(folder, pipeline)
    checkpoints.save(2)
    checkpoints._save.files_future.result(20)
    if rank == 1:
        os._exit(9)
    return type(error_of(checkpoints.finish))


@pytest.mark.slow
def test_a_rank_that_dies_between_writing_and_announcing_hides_nothing(tmp_path, on_one_rank):
    outcome = run_ranks_with_deaths(2, die_before_announcing, str(tmp_path))

    assert outcome.exit_codes == {1: 9}
    assert issubclass(outcome.results[0], PipelineError)
    assert [name for name in names(tmp_path) if not name.endswith(".partial")] == ["step-1"]
    pipeline, _, _ = on_one_rank(tmp_path)
    load_checkpoint(tmp_path, pipeline)
