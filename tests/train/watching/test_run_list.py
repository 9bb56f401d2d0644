"""Runs side by side: what their folders say of them."""

import json

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.train.claim import claimed
from penstock.train.settings.config import config_to_toml
from penstock.train.watching.run_list import differences, list_runs
from tests.train.settings.tables import config_with

ROWS = [
    {"step": 1, "loss": 5.0, "tokens_per_s": 1.0},
    {"step": 2, "loss": 4.0, "tokens_per_s": 50.0, "held_out_loss": 4.5},
    {"step": 3, "loss": 3.0, "tokens_per_s": 60.0},
    {"step": 4, "loss": 2.5, "tokens_per_s": 70.0},
    {"step": 5, "loss": 2.0, "tokens_per_s": 90.0, "peak_bytes_rank0": 2**30, "peak_bytes_rank1": 3 * 2**30},
]


def config_of(folder, **batch):
    return config_with(run={"folder": str(folder), "steps": 5}, batch={"size": 8} | batch)


def write_run(folder, rows=ROWS, *, is_finished=False, **batch):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config_to_toml(config_of(folder, **batch)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if is_finished:
        (folder / "summary.json").write_text("{}")
    return folder


def test_a_run_is_known_by_its_files(tmp_path):
    [run] = list_runs([write_run(tmp_path / "one", is_finished=True)])[0]

    assert (run.name, run.state, run.step, run.config.run.steps) == ("one", "finished", 5, 5)
    assert (run.last("loss"), run.last("held_out_loss"), run.last("bubble_fraction")) == (2.0, 4.5, None)
    assert run.tokens_per_s == 80.0  # without the first three steps
    assert run.peak_bytes == [2**30, 3 * 2**30]
    assert run.curve("held_out_loss") == ([2], [4.5])
    assert run.curve("loss") == ([1, 2, 3, 4, 5], [5.0, 4.0, 3.0, 2.5, 2.0])


def test_a_run_that_a_process_holds_is_running_and_any_other_unfinished_one_interrupted(tmp_path):
    folder = tmp_path / "one"
    with claimed(config_of(folder)) as (config, _):
        (folder / "config.toml").write_text(config_to_toml(config))
        assert [run.state for run in list_runs([folder])[0]] == ["running"]
    assert [run.state for run in list_runs([folder])[0]] == ["interrupted"]


def test_of_a_step_written_twice_the_last_line_counts_a_broken_line_none_and_without_a_file_nothing(tmp_path):
    again = [{"step": 4, "loss": 2.25, "tokens_per_s": 70.0}]
    folder = write_run(tmp_path / "one", [*ROWS, *again])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')

    [run] = list_runs([folder])[0]

    assert run.curve("loss") == ([1, 2, 3, 4, 5], [5.0, 4.0, 3.0, 2.25, 2.0])
    (folder / "metrics.jsonl").unlink()
    [run] = list_runs([folder])[0]
    assert (run.step, run.last("loss"), run.tokens_per_s) == (0, None, None)


def test_only_settings_that_decide_what_is_learned_count_as_differences(tmp_path):
    write_run(tmp_path / "a", size=8)
    write_run(tmp_path / "b", size=16, length=64)

    assert differences(list_runs([tmp_path])[0]) == [
        ["batch.size=8", "batch.length=128"],
        ["batch.size=16", "batch.length=64"],
    ]
    assert differences(list_runs([tmp_path / "a"])[0]) == [[]]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["none"], "none is no folder"),
        ([""], "holds no run: neither it nor a folder in it has a"),
        (["a", "e*"], r"no folder that '.*e\*' matches holds a run; give folders of runs"),
        (["a", "gone"], "gone is no folder"),
        (["a/b"], r"(?s)no run can be read:\nrun c is left out: .*\nrun d is left out: "),
    ],
)
def test_where_no_run_is_or_can_be_read_the_folder_is_named(tmp_path, names, message):
    if names != [""]:
        write_run(tmp_path / "a")
        (tmp_path / "empty").mkdir()
        for name in ("c", "d"):
            (write_run(tmp_path / "a" / "b" / name) / "config.toml").write_text("[run\n")

    with pytest.raises(ConfigError, match=message) as caught:
        list_runs([tmp_path / name for name in names])

    assert caught.value.key == "DIR"


def test_a_broken_configuration_or_metrics_file_of_the_only_run_is_named(tmp_path):
    folder = write_run(tmp_path / "one")
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(PenstockError, match=r"metrics.jsonl cannot be read: Is a directory"):
        list_runs([folder])

    (folder / "config.toml").write_text("[run]\nfolder = 3\n")
    with pytest.raises(PenstockError, match=r"config\.toml"):
        list_runs([folder])


def test_runs_that_cannot_be_read_are_named_and_the_others_listed(tmp_path):
    for name in ("a", "b", "c", "d"):
        write_run(tmp_path / name)
    (tmp_path / "b" / "config.toml").write_text("[run\n")
    (tmp_path / "c" / "metrics.jsonl").write_text('{"step":1,"loss":2.0}\nloss 2.0\n')

    found, unreadable = list_runs([tmp_path])

    assert [run.name for run in found] == ["a", "d"]
    of_config, of_metrics = unreadable
    assert of_config.startswith(f"run b is left out: {tmp_path / 'b' / 'config.toml'}:")
    assert of_metrics == (
        f"run c is left out: {tmp_path / 'c' / 'metrics.jsonl'}:2:1: not the numbers of a step; remove the line"
    )


def test_places_may_be_folders_of_runs_runs_and_patterns_and_names_tell_each_run_once_and_apart(tmp_path, monkeypatch):
    for name in ("old/z", "new/lr-2", "new/lr-1", "new/other"):
        write_run(tmp_path / name)
    (tmp_path / "new" / "lr-tokens").mkdir()
    monkeypatch.chdir(tmp_path)

    found = list_runs(["old", "new/lr-*", "new/other", "old/z", "new/lr-[12]"])[0]

    assert [run.name for run in found] == ["z", "lr-1", "lr-2", "other"]
    assert [str(run.folder) for run in found] == ["old/z", "new/lr-1", "new/lr-2", "new/other"]
    write_run(tmp_path / "new" / "z[1]")
    assert [run.name for run in list_runs(["new/z[1]"])[0]] == ["z[1]"], "a name that looks like a pattern"
    write_run(tmp_path / "new" / "z")
    assert [run.name for run in list_runs(["old", "new"])[0]] == ["old/z", "lr-1", "lr-2", "other", "new/z", "z[1]"]
