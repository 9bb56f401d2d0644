"""Which of DIR, DIR-2, DIR-3, ... a run begins in, and that nothing of another run is touched."""

import io
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from penstock.checkpoints.manifest import MANIFEST, Manifest, manifest_bytes
from penstock.errors import CheckpointError, ConfigError, PenstockError
from penstock.train import claim
from penstock.train.claim import Start, claimed, claimed_together, joined
from penstock.train.folder.run_folder import RunFolder
from penstock.train.folder.run_lock import RunLock
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.folder.test_run_lock import holding
from tests.train.settings.tables import config_with, merged


def config_in(folder, **sections):
    return config_with(**merged({"run": {"folder": str(folder)}}, sections))


def run_in(folder, *, is_finished=True, start=Start.BY_RULE, **sections):
    """Run in a folder by the rule; return the name of the folder that it began in, and the line that says so."""
    with claimed(config_in(folder, **sections), start) as (config, note):
        own = RunFolder(folder.with_name(os.path.basename(config.run.folder)))
        own.begin(config, is_forced=start is Start.FORCE)
        own.write("weights.safetensors", own.path.name.encode())
        if is_finished:
            own.write("summary.json", b"{}")
    return own.path.name, note


@pytest.fixture
def base(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def holder(base):
    """Another process that holds the folder."""
    base.mkdir()
    with holding(base) as process:
        yield process


def checkpoint(folder, *steps):
    """Put checkpoints there that can be read and hold nothing."""
    rest = {"pipeline_steps": 0, "ranks": 1, "schedule": "1f1b", "extra": {}, "random": [{}]}
    for step in steps:
        path = folder / "checkpoints" / f"step-{step}"
        path.mkdir(parents=True)
        held = Manifest(penstock="0.1.0", step=step, weights={}, optimizer=None, files={}, **rest)
        (path / MANIFEST).write_bytes(manifest_bytes(held))


def test_a_run_whose_folders_are_all_taken_meanwhile_is_refused(base, monkeypatch):
    monkeypatch.setattr(claim, "_take", lambda choice: None)

    with pytest.raises(PenstockError, match=r"run: other processes took \d+ folders meanwhile; start again"):
        run_in(base)


def test_a_lock_that_cannot_be_shared_with_the_ranks_is_refused_and_leaves_nothing(base, monkeypatch):
    monkeypatch.setattr(RunLock, "share", lambda lock: False)

    error = error_of(run_in, base)

    assert isinstance(error, ConfigError)
    assert str(base) in str(error)
    assert not base.exists()


def contents(folder):
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes() for path in paths}


def test_another_tokenizer_file_is_refused_where_a_run_would_continue_and_old_folders_go_on(base):
    def data(digest):
        return {"data": {"tokenizer": "words.json", "tokenizer_digest": digest}}

    def refusal(**sections):
        return str(error_of(lambda: run_in(base, **sections)))

    run_in(base, is_finished=False, **data("a" * 64))
    checkpoint(base, 4)
    before = contents(base)

    assert refusal(**data("b" * 64)) == (
        f"{base}: data.tokenizer: words.json has changed since the run began: its sha256 begins with bbbbbbbbbbbb, "
        "expected aaaaaaaaaaaa. Put the file back, or begin in the next folder with --fresh"
    )
    assert contents(base) == before
    assert run_in(base, start=Start.FRESH, **data("b" * 64))[0] == "run-2"
    shutil.rmtree(base.with_name("run-2"))
    (base / "config.toml").write_text((base / "config.toml").read_text().replace("a" * 64, ""))
    assert run_in(base, is_finished=False, **data("b" * 64))[0] == "run"


def test_a_run_begins_where_nothing_or_only_a_profile_is(base):
    assert run_in(base / "deep") == ("deep", f"run folder: {base}/deep (new)")
    (base / "tokens").mkdir(parents=True)
    (base / "costs.toml").touch()
    (base / "layer_times.json").touch()
    shutil.rmtree(base / "deep")
    assert run_in(base) == ("run", f"run folder: {base} (holds no run yet)")


def unfinished(base, *steps):
    run_in(base, is_finished=False)
    checkpoint(base, *steps)


def of_files(base):
    base.mkdir()
    (base / "thesis.tex").touch()


def of_another_program(base):
    base.mkdir()
    (base / "config.toml").write_text("[theirs]\n")


OTHERS = {
    "model.width": 80,
    "data.held_out_fraction": 0.1,
    "batch.length": 64,
    "optimizer.learning_rate": 0.5,
    "run.seed": 7,
    "run.skip_updates": True,
}


@pytest.mark.parametrize(
    ("fill", "changes", "holds"),
    [
        (run_in, {}, "a finished run"),
        (lambda base: unfinished(base, 100), {"run.steps": 99}, "a run that has passed step 99"),
        (of_files, {}, "files but no run"),
        (of_another_program, {}, "a config.toml that cannot be read"),
        *((unfinished, {key: value}, f"an unfinished run with another {key}") for key, value in OTHERS.items()),
    ],
)
def test_a_folder_that_holds_something_else_is_left_alone_and_the_next_number_is_named(base, fill, changes, holds):
    fill(base)
    before = contents(base)
    sections = {key.partition(".")[0]: {key.partition(".")[2]: value} for key, value in changes.items()}

    assert run_in(base, **sections) == ("run-2", f"run folder: {base}-2 ({base} holds {holds})")
    assert contents(base) == before


def test_the_highest_number_decides(base):
    run_in(base)
    base.with_name("run-10").mkdir()

    assert run_in(base)[0] == "run-10"
    shutil.rmtree(base)
    assert run_in(base)[0] == "run-11"
    assert not base.exists()


def test_an_unfinished_run_without_a_checkpoint_begins_again_in_place(base):
    run_in(base, is_finished=False)

    anew = f"run folder: {base} (its unfinished run has the same settings and no checkpoint, and begins at step 0)"
    assert run_in(base, is_finished=False, run={"steps": 90}) == ("run", anew)
    assert run_in(base)[0] == "run"
    assert list(contents(base)) == [".lock", "config.toml", "summary.json", "weights.safetensors"]


def test_an_unfinished_run_continues_from_its_newest_checkpoint(base):
    run_in(base, is_finished=False)
    checkpoint(base, 9, 50, 100)

    for other in ({}, {"pipeline": {"ranks": 1}}, {"data": {"prefetch": 5}}, {"run": {"steps": 100}}):
        note = f"run folder: {base} (its run has the same settings and continues after step 100)"
        assert run_in(base, is_finished=False, **other) == ("run", note)


def test_a_finished_run_continues_where_it_is_to_have_more_steps(base):
    run_in(base, run={"steps": 50})
    checkpoint(base, 50)

    assert run_in(base, run={"steps": 50})[0] == "run-2"
    shutil.rmtree(base.with_name("run-2"))
    assert run_in(base, run={"steps": 60}, batch={"size": 32})[0] == "run-2"
    shutil.rmtree(base.with_name("run-2"))
    assert run_in(base, run={"steps": 60}, is_finished=False)[1].endswith("and continues after step 50)")


def test_resuming_needs_a_checkpoint(base):
    cases = []
    for make in (
        lambda: None,
        base.mkdir,
        lambda: run_in(base, is_finished=False),
        lambda: run_in(base),
    ):
        make()
        cases.append(error_of(lambda: run_in(base, start=Start.RESUME)))

    assert [type(error) for error in cases] == [CheckpointError] * 4
    assert [str(error).removeprefix(f"--resume: {base}: ").partition(";")[0] for error in cases] == [
        "there is no such folder",
        "holds no run yet",
        "its run has no checkpoint",
        "holds a finished run",
    ]
    (base / "summary.json").unlink()
    checkpoint(base, 5)
    assert run_in(base, start=Start.RESUME)[1].endswith("continues after step 5)")


@pytest.mark.parametrize(
    ("start", "damage", "told"),
    [
        (Start.BY_RULE, lambda step: (step / "model.pt").write_bytes(b"\x80\x04"), "step-6: holds a pickle (model.pt)"),
        (Start.RESUME, lambda step: (step / MANIFEST).unlink(), "none of 2 checkpoints is as it was written"),
    ],
)
def test_checkpoints_that_cannot_be_read_are_refused_before_anything_changes(base, start, damage, told):
    unfinished(base, 5, 6)
    for step in (5, 6):
        damage(base / "checkpoints" / f"step-{step}")
    before = contents(base)

    error = error_of(lambda: run_in(base, start=start))

    assert isinstance(error, CheckpointError)
    assert told in str(error)
    assert contents(base) == before


@pytest.mark.parametrize("start", [Start.BY_RULE, Start.FORCE])
def test_a_folder_that_a_process_holds_is_refused_and_named(base, holder, start):
    with pytest.raises(ConfigError, match=rf"run is in use by process {holder.pid}\. Wait until .* --fresh"):
        run_in(base, start=start)

    assert os.listdir(base) == [".lock"]


def test_fresh_takes_the_next_number_always(base, holder):
    assert run_in(base, start=Start.FRESH) == ("run-2", f"run folder: {base}-2 (--fresh: {base} exists)")
    assert run_in(base, start=Start.FRESH, is_finished=False)[0] == "run-3"
    assert run_in(base.with_name("none"), start=Start.FRESH)[0] == "none"


def test_force_begins_in_the_folder_itself_and_leaves_the_others(base):
    run_in(base)
    run_in(base)
    (base / "tokens").mkdir()
    (base / "tokens" / "old.tokens").touch()

    assert run_in(base, start=Start.FORCE, is_finished=False) == ("run", f"run folder: {base} (--force)")
    assert list(contents(base)) == [".lock", "config.toml", "weights.safetensors"]
    assert (base.with_name("run-2") / "weights.safetensors").read_bytes() == b"run-2"
    assert run_in(base, start=Start.RESTART) == ("run", f"run folder: {base} (restarted)")  # by torchrun


@pytest.mark.parametrize(
    ("start", "is_finished"),
    [(Start.BY_RULE, False), (Start.BY_RULE, True), (Start.FRESH, True), (Start.FORCE, False), (Start.FORCE, True)],
)
def test_runs_that_start_at_the_same_moment_never_share_a_folder(base, start, is_finished):
    run_in(base, is_finished=is_finished)
    together, all_claimed = Barrier(8), Barrier(8)

    def begin(_):
        together.wait()
        try:
            with claimed(config_in(base), start) as (config, _):
                all_claimed.wait()
                return config.run.folder
        except ConfigError as error:
            all_claimed.wait()
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(begin, range(8)))

    folders = [outcome for outcome in outcomes if "in use" not in outcome]
    assert len(folders) == len(set(folders)) >= 1
    assert start is not Start.FRESH or len(folders) == 8


def test_a_folder_is_held_as_long_as_the_run_lasts(base):
    with claimed(config_in(base), Start.BY_RULE):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            run_in(base)
        assert RunLock.take(base) is None
    assert run_in(base)[0] == "run"


def test_a_run_that_did_not_begin_leaves_no_trace(base):
    def fail_in(folder):
        with claimed(config_in(folder), Start.BY_RULE):
            raise ZeroDivisionError

    for folder in (base / "deep" / "run", base):
        with pytest.raises(ZeroDivisionError):
            fail_in(folder)
    run_in(base)
    with pytest.raises(ZeroDivisionError):
        fail_in(base)

    assert os.listdir(base.parent) == ["run"]


def test_a_rank_shares_the_folder_of_its_run_and_no_other(base, holder):
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"), joined(base):
        pass
    with joined(base.with_name("not here")):
        assert not base.with_name("not here").exists()
    with claimed(config_in(base), Start.FRESH) as (config, _):
        lock_file = base.with_name(os.path.basename(config.run.folder)) / ".lock"
        with joined(lock_file.parent):
            assert len(lock_file.read_text().splitlines()) == 2


def claim_and_tell(wires, configs, start):
    output = io.StringIO()
    with claimed_together(configs[wires.rank], wires, start, output) as config:
        return config.run.folder, output.getvalue()


def test_rank_0_decides_for_all_ranks(base, tmp_path):
    run_in(base)
    configs = [config_in(base), config_in(tmp_path / "elsewhere")]

    told = on_ranks(2, claim_and_tell, configs, Start.BY_RULE)

    assert told == [(f"{base}-2", f"run folder: {base}-2 ({base} holds a finished run)\n"), (f"{base}-2", "")]
    base.with_name("run-2").mkdir()
    with holding(base.with_name("run-2")):
        errors = on_ranks(2, lambda wires: error_of(claim_and_tell, wires, configs, Start.BY_RULE))
    assert all(isinstance(error, PenstockError) and "in use by process" in str(error) for error in errors)
