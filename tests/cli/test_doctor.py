"""`penstock doctor`: a run folder, or this machine."""

import json
from dataclasses import replace

import pytest

from penstock.train.folder.run_folder import RunFolder
from tests.cli.recorded_steps import recorded_step
from tests.train.settings.tables import config_with


@pytest.fixture
def folder(tmp_path):
    """A run folder in which a step was recorded."""
    run = {"run": {"folder": str(tmp_path)}, "model": {"layers": 14}, "batch": {"size": 16}}
    RunFolder(tmp_path).begin(config_with(**run, pipeline={"ranks": 4, "microbatches": 8}))
    recorded_step().save(tmp_path / "timeline.json")
    return tmp_path


def test_costs_of_a_profile_in_the_folder_tell_how_backwards_split(folder, printed):
    assumed = printed("doctor", folder)
    (folder / "costs.toml").write_text(
        "forward_s = 1.0\nsplit_forward_s = 1.5\nbackward_s = 2.0\nbackward_input_s = 2.0\nbackward_weight_s = 0.0\n"
    )
    measured = printed("doctor", folder)

    assert "zb-h1" in assumed
    assert "taken to be halves" in assumed
    assert "zb-h1" not in measured
    assert "halves" not in measured


def test_bytes_of_a_profile_in_the_folder_tell_what_memory_is_compared_by(folder, printed):
    assert "as if all layers held as much; penstock profile measures it" in printed("doctor", folder)
    sizes = [1000] * 4 + [1] * 12
    (folder / "costs.toml").write_text(f'per = "layer"\nforward_s = {[1.0] * 16}\nactivation_bytes = {sizes}\n')
    measured = printed("doctor", folder)

    assert "by what was profiled of each layer" in measured
    assert "as if all layers" not in measured


def test_with_a_limit_of_memory_what_waits_for_it_is_told(folder, printed):
    """Rank 0 of 1F1B holds 4 activations and waits with the fifth forward for a backward to free one."""
    limited = json.loads(printed("doctor", folder, "--to", "json", "--memory-limit", "4 microbatches"))["idle_s"][0]
    free = json.loads(printed("doctor", folder, "--to", "json"))["idle_s"][0]

    assert limited["memory limit"] > 0 == free["memory limit"]
    assert limited["idle"] == free["idle"]


def test_a_saved_step_is_told_without_what_only_a_run_file_knows(folder, printed, tmp_path):
    recorded_step().save(tmp_path / "step.json")

    of_run, text = printed("doctor", folder), printed("doctor", tmp_path / "step.json")
    document = json.loads(printed("doctor", tmp_path / "step.json", "--to", "json"))

    assert text.splitlines()[:2] == of_run.splitlines()[:2]
    for part in ("step 20: 1f1b, 4 ranks", "idle time of each rank", "what would help", "do next"):
        assert part in text
        assert part in of_run
    assert "16 microbatches" in of_run
    assert "--set" in of_run
    assert "16 microbatches" not in text
    assert "--set" not in text
    assert {"schedule"} == {change["sort"] for change in document["changes"]}
    assert "split 3,4,4,5, as asked" in printed("doctor", tmp_path / "step.json", "--split", "3,4,4,5")


def test_of_a_step_without_known_layers_the_causes_are_told(printed, tmp_path):
    bare = replace(recorded_step(), layers_of_stage=(), layer_weights=(), message_bytes=(), prologues=())
    bare.save(tmp_path / "step.json")

    text = printed("doctor", tmp_path / "step.json")

    assert text.startswith("step 20: 1f1b, 4 ranks, 4 stages, 8 microbatches\n")
    assert "idle time of each rank" in text
    assert "what would help" not in text


def test_the_table_names_everything_that_training_needs(printed):
    lines = printed("doctor", "--system").splitlines()

    assert lines[0].split("  ")[0] == "what"
    assert lines[0].endswith("what to fix")
    subjects = [line.split("  ")[0] for line in lines[2:]]
    assert subjects[:8] == [
        "Python", "torch", "backends", "GPUs", "cores", "memory", "loopback", "hostname",
    ]  # fmt: skip
    optional = ["matplotlib", "tensorboard", "wandb", "tokenizers", "transformers", "peft", "datasets"]
    assert subjects[8:] == ["disk, this folder", "disk, temporary", *optional]


@pytest.mark.parametrize("split", ["2,4,5,5", "4, 4, 4, 4"])
def test_it_says_what_an_asked_split_would_do(folder, split, printed):
    text = "split " + split.replace(" ", "")

    told = printed("doctor", folder, "--split", split)
    document = json.loads(printed("doctor", folder, "--split", split, "--to", "json"))
    [change] = [each for each in document["changes"] if each["change"] == text]

    [line] = [line for line in told.splitlines() if line.startswith(text)]
    assert line == f"{text}, as asked: step {100 * change['step_change']:+.1f} %, memory " + (
        f"{100 * change['memory_change']:+.1f} %"
    )
    assert (change["step_change"] > 0.05) == (split != "4, 4, 4, 4")
    assert "as asked" not in told.splitlines()[-1]


def test_what_does_not_fit_the_run_is_one_message(folder, refused, tmp_path):
    told = refused("doctor", folder, "--split", "8,8")
    assert "split [8, 8] names 2 stages, but the schedule has 4; give 4 numbers" in told
    told = refused("doctor", folder, "--split", "4,4,4,4", "--split", "4,4,4,4", status=2)
    assert "--split is given twice; keep one" in told
    replace(recorded_step(), source="predicted").save(tmp_path / "step.json")
    told = refused("doctor", tmp_path / "step.json")
    assert "step.json is a predicted timeline; give one that was measured" in told
    (folder / "timeline.json").unlink()
    assert "holds no timeline.json" in refused("doctor", folder)
