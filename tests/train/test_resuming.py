"""A run continues from its checkpoints, and then comes to the same end."""

import io
import json
import re
import shutil
from contextlib import nullcontext

import pytest
from safetensors.torch import load_file, save_file

from penstock.checkpoints.folder import CheckpointFolder
from penstock.checkpoints.manifest import MANIFEST
from penstock.cli.entry import main
from penstock.errors import CheckpointError, PenstockError
from penstock.train import loop
from penstock.train.claim import Start
from penstock.train.loop import train
from penstock.train.resuming import RunCheckpoints
from penstock.train.settings.config import config_from_table
from penstock.train.stopping import StopRequest
from penstock.train.watching.metrics import read_metrics
from tests.support.local_pipelines import error_of
from tests.support.tiny_run import TEXT
from tests.train.local_ranks import Stopping
from tests.train.settings.tables import merged
from tests.train.tiny_runs import save_tokenizer, tiny_table, trained

NUM_STEPS = 8


@pytest.fixture
def here(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def table_in(folder, **sections):
    run = {"steps": NUM_STEPS, "evaluate_batches": 1, "record_step": 2}
    checkpoint = {"every": 2, "keep_last": 20}
    table = tiny_table(
        folder / "run", folder / "text.txt", run=run, optimizer={"warmup_steps": 2}, checkpoint=checkpoint
    )
    return merged(table, sections)


def run(folder, *, stop=None, start=Start.BY_RULE, **sections):
    """Train, and return what was printed; a run that is stopped returns as well."""
    output = io.StringIO()
    request = StopRequest() if stop is None else Stopping(stop)
    with pytest.raises(KeyboardInterrupt) if stop else nullcontext():
        train(config_from_table(table_in(folder, **sections)), output=output, stop=request, start=start)
    return output.getvalue()


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights and losses of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text(TEXT)
    run(folder)
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    return load_file(folder / "run" / "weights.safetensors"), [row["loss"] for row in rows]


def assert_same_end(folder, whole):
    weights, losses = whole
    found = load_file(folder / "run" / "weights.safetensors")
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weights[name]) for name in weights)
    assert [row["loss"] for row in read_metrics(folder / "run" / "metrics.jsonl")] == losses
    assert json.loads((folder / "run" / "summary.json").read_text())["num_steps"] == NUM_STEPS


class Acting(StopRequest):
    """Does something behind the last computation of a step, before what is due is saved."""

    def __init__(self, step, act):
        super().__init__()
        self.actions = [lambda: None] * (step - 1) + [act]

    @property
    def is_requested(self):
        if self.actions:
            self.actions.pop(0)()
        return False


def ended_by(folder, stop, **sections):
    return str(error_of(trained, table_in(folder, **sections), stop=stop))


@pytest.mark.parametrize(("asynchronous", "every"), [(True, 2), (False, 0)])
def test_a_run_whose_folder_is_renamed_ends_with_a_checkpoint_there(here, whole, asynchronous, every):
    how = {"every": every, "keep_last": 20, "asynchronous": asynchronous}

    told = ended_by(here, Acting(5, lambda: (here / "run").rename(here / "kept")), checkpoint=how)

    assert told == (
        f"{here}/run was renamed during the run, which ends here. Step 5 is saved in {here}/kept: continue with --set "
        f"run.folder={here}/kept"
    )
    assert not (here / "run").exists()
    assert (here / "kept" / "checkpoints" / "step-5" / MANIFEST).exists()
    run(here, run={"folder": str(here / "kept"), "steps": NUM_STEPS, "evaluate_batches": 1, "record_step": 2})
    (here / "kept").rename(here / "run")
    assert_same_end(here, whole)


def test_a_folder_that_is_renamed_while_a_checkpoint_is_written_keeps_it(here, monkeypatch):
    begin = CheckpointFolder.begin

    def rename_then_begin(self, step):
        if step == 4 and (here / "run").exists():
            partial = begin(self, step)
            (here / "run").rename(here / "kept")
            return partial
        return begin(self, step)

    monkeypatch.setattr(CheckpointFolder, "begin", rename_then_begin)
    told = ended_by(here, StopRequest(), checkpoint={"every": 2, "asynchronous": False})

    assert "was renamed during the run" in told
    assert (here / "kept" / "checkpoints" / "step-4" / MANIFEST).exists()
    assert not (here / "run").exists()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_run_whose_folder_is_removed_ends_with_a_checkpoint_in_a_new_one(here, is_taken):
    def remove():
        shutil.rmtree(here / "run")
        if is_taken:
            (here / "run").mkdir()

    told = ended_by(here, Acting(5, remove))

    place = here / ("run-2" if is_taken else "run")
    assert told.startswith(f"{here}/run was removed during the run, which ends here. Step 5 is saved in {place}: ")
    assert f"continuing after step 5 from {place}" in run(here)


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stopped_run_comes_to_the_same_end(here, whole, asynchronous):
    how = {"checkpoint": {"every": 50, "asynchronous": asynchronous}}
    printed = run(here, stop=5, **how)
    again = run(here, **how)

    assert "stopped by a signal after step 5; its checkpoint is saved\n" in printed
    assert f"run folder: {here}/run (its run has the same settings and continues after step 5)\n" in again
    assert f"continuing after step 5 from {here}/run/checkpoints/step-5\n" in again
    assert re.search(r"loss \d\.\d+, \d of \d steps in 0:", again)
    assert_same_end(here, whole)
    assert (here / "run" / "timeline.trace.json").exists(), "the recorded step of before is reported"


@pytest.mark.slow
@pytest.mark.parametrize("around", [0, 1])
def test_resuming_around_the_end_of_an_epoch_twice_misses_no_window(here, around):
    (here / "short.txt").write_text(TEXT[:641])  # 40 windows of 16 tokens are 10 batches of 4
    how = {"data": {"files": [str(here / "short.txt")], "held_out_fraction": 0.0}}
    settings = {"evaluate_batches": 0, "steps": 23}
    run(here, **how, run={**settings, "folder": str(here / "whole")})
    expected = [row["loss"] for row in read_metrics(here / "whole" / "metrics.jsonl")]

    run(here, stop=10 + around, **how, run=settings)
    run(here, stop=10, **how, run=settings)
    run(here, **how, run=settings)

    assert {10 + around, 20 + around} < set(steps_in(here))
    assert [row["loss"] for row in read_metrics(here / "run" / "metrics.jsonl")] == expected


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_older_one_taken(here, whole):
    run(here, stop=6, checkpoint={"every": 2})
    shard = next((here / "run" / "checkpoints" / "step-6").glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1])

    printed = run(here)

    assert f"warning: {shard}: has " in printed
    assert f"the damaged checkpoint is now {here}/run/checkpoints/step-6.damaged-1\n" in printed
    assert "continuing after step 4 " in printed
    assert_same_end(here, whole)


def save_words(path, words):
    save_tokenizer(path, {word: number for number, word in enumerate(words)}, unknown=".")


@pytest.mark.slow
def test_a_tokenizer_file_that_does_not_match_the_checkpoint_is_refused_by_train_and_generate(here, capsys):
    words = sorted(set(TEXT.replace(".", " .").split()))
    how = {"data": {"files": [str(here / "text.txt")], "tokenizer": str(here / "words.json")}}
    save_words(here / "words.json", words)
    run(here, stop=2, **how)
    generate = ["generate", str(here / "run"), "--prompt", words[0], "--tokens", "2"]
    assert main(generate) == 0
    save_words(here / "words.json", words[::-1])  # as many tokens, but others

    assert main(generate) == 1
    assert f"data.tokenizer: {here}/words.json has changed since the run began" in capsys.readouterr().err
    error = error_of(lambda: run(here, **how))

    assert isinstance(error, CheckpointError)
    assert f"{here}/run: data.tokenizer: {here}/words.json has changed since the run began: its sha256" in str(error)
    assert "begin in the next folder with --fresh" in str(error)


@pytest.mark.slow
def test_weights_of_a_run_with_another_tokenizer_file_are_taken_with_a_note(here):
    words = sorted(set(TEXT.replace(".", " .").split()))
    how = {"data": {"files": [str(here / "text.txt")], "tokenizer": str(here / "words.json")}, "run": {"steps": 1}}
    save_words(here / "words.json", words)
    run(here, **how)
    how |= {"checkpoint": {"load": str(here / "run")}}
    note = f"note: they were trained with another tokenizer file than {here}/words.json"

    assert note not in run(here, start=Start.FRESH, **how)
    save_words(here / "words.json", words[::-1])
    assert note in run(here, start=Start.FRESH, **how)


def test_a_killed_end_is_made_up_for(here, whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_weights", lambda *_: 1 / 0)
        assert isinstance(error_of(lambda: run(here)), ZeroDivisionError)

    run(here)

    assert_same_end(here, whole)


def test_without_checkpoints_a_run_is_as_it_was_also_where_no_folder_for_them_can_be_written(here, whole, monkeypatch):
    run(here, stop=1, checkpoint={"every": 0})
    (here / "run" / "checkpoints").write_text("a file")
    taken = []
    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "resume", lambda self: taken.append(self))
        error = error_of(lambda: run(here))
    assert isinstance(error, PenstockError)
    assert "run/checkpoints: cannot be written: " in str(error)
    assert taken == [], "it is found before a step"

    (here / "run" / "checkpoints").unlink()
    run(here, checkpoint={"every": 0})
    assert not (here / "run" / "checkpoints").exists()
    assert_same_end(here, whole)


def test_a_run_begins_with_the_weights_of_another_and_goes_on_with_its_own_text_alone(here, whole):
    weights, losses = whole
    save_file(weights, here / "theirs.safetensors")

    printed = run(here, run={"steps": 1}, checkpoint={"load": str(here / "theirs.safetensors")})

    assert f"the weights are those of {here}/theirs.safetensors\n" in printed
    assert read_metrics(here / "run" / "metrics.jsonl")[0]["loss"] < losses[0] - 0.05
    again = run(here, run={"steps": 2}, checkpoint={"load": str(here / "theirs.safetensors")})
    assert "the weights are those of" not in again
    shutil.rmtree(here / "run" / "tokens")
    (here / "text.txt").write_text(TEXT.replace("fox", "cat"))
    assert "was trained on another text, or with another tokenizer" in str(error_of(lambda: run(here)))


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_main_weights_and_the_loss_scale_continue(here, compute):
    how = {"precision": {"compute": compute, "loss_scale": 2.0**40}, "checkpoint": {"every": 3}}
    settings = {"evaluate_batches": 0, "record_step": 0}
    run(here, **how, run={**settings, "folder": str(here / "whole")})

    run(here, stop=4, **how, run=settings)
    run(here, **how, run=settings)

    rows = [read_metrics(here / name / "metrics.jsonl") for name in ("whole", "run")]
    assert [[row["loss"], row.get("loss_scale")] for row in rows[1]] == [
        [row["loss"], row.get("loss_scale")] for row in rows[0]
    ]
    weights = [load_file(here / name / "weights.safetensors") for name in ("whole", "run")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_the_evaluations_without_a_lower_loss_are_counted_on(here):
    how = {"optimizer": {"warmup_steps": 1, "learning_rate": 1e-30}}
    settings = {"evaluate_every": 1, "patience": 4, "record_step": 0}
    whole = run(here, **how, run={**settings, "folder": str(here / "whole")})
    last = read_metrics(here / "whole" / "metrics.jsonl")[-1]["step"]
    assert "stopped early" in whole

    run(here, stop=last - 1, **how, run=settings)
    assert "stopped early" in run(here, **how, run=settings)

    assert read_metrics(here / "run" / "metrics.jsonl")[-1]["step"] == last
    assert max(steps_in(here)) == last, "the last step is saved, too"
