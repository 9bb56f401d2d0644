"""`penstock evaluate`: the loss of a run's weights, as the run itself had it, on one process and on several."""

import json
import math
import shutil
import tomllib

import pytest
import tomlkit

from penstock.cli.entry import main
from tests.support.tiny_run import PENSTOCK, TORCHRUN, fork, fork_training, settings, write_tiny_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished run that has two checkpoints, and its text."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_run(folder)
    training = fork_training(folder, "run.evaluate_every=3", "checkpoint.every=3", "run.evaluate_batches=2")
    output, errors = training.communicate(timeout=120)
    assert training.returncode == 0, output + errors
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of that folder, which is the current one."""
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "copy"


def held_out_losses(folder):
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}


def evaluated(capsys, *arguments):
    assert main(["evaluate", *arguments, "--to", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def files_of(folder):
    """All files but the tokens of texts, by their paths."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tokens"]
    return {path: path.read_bytes() for path in paths}


@pytest.fixture
def refusal(refused):
    """Ask for an evaluation that is refused; return the line that says why."""

    def run(*arguments, status=1):
        [line] = refused("evaluate", *arguments, status=status).splitlines()
        return line.removeprefix("penstock: ")

    return run


def test_the_weights_and_each_checkpoint_have_the_loss_that_the_run_reported(capsys, printed, place):
    expected = held_out_losses(place)

    of_run = evaluated(capsys, "run")
    of_steps = {step: evaluated(capsys, "run", "--checkpoint", str(step)) for step in expected}

    assert sorted(expected) == [3, 6]
    assert of_run["loss"] == expected[6]
    assert of_run["perplexity"] == math.exp(of_run["loss"])
    assert (of_run["num_batches"], of_run["num_tokens"], of_run["weights"]) == (2, 128, "run/weights.safetensors")
    assert {step: found["loss"] for step, found in of_steps.items()} == expected
    assert {found["step"] for found in of_steps.values()} == {3, 6}
    told = f"run/weights.safetensors: loss {expected[6]:.4f}, perplexity {math.exp(expected[6]):.4g} on held-out text"
    assert printed("evaluate", "run") == f"{told} (128 tokens, 2 batches)\n"


@pytest.mark.slow
def test_a_run_that_was_moved_is_evaluated_and_only_tokens_are_written(capsys, place):
    (place / "run").rename(place / "moved")
    before = files_of(place / "moved")

    assert evaluated(capsys, "moved")["weights"] == "moved/weights.safetensors"
    assert files_of(place / "moved") == before
    assert not (place / "run").exists()
    (place / "moved" / "weights.safetensors").unlink()
    assert evaluated(capsys, "moved")["weights"] == "moved/checkpoints/step-6"


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_another_text_is_evaluated_as_a_whole_each_sequence_once(capsys, place, packing):
    (place / "a.txt").write_bytes(bytes(range(32, 32 + 60)))  # with its end 61 tokens: 3 windows of 16 and a rest
    (place / "b.txt").write_bytes(b"x" * 100)

    many = evaluated(capsys, "run", "--data", "a.txt", "--set", f"data.packing={packing}")
    one = evaluated(capsys, "run", "--data", "b.txt", "--set", f"data.packing={packing}", "--set", "batch.size=2")

    assert (many["num_batches"], many["num_tokens"]) == ((1, 16) if packing == "none" else (1, 48))
    assert (one["num_batches"], one["num_tokens"]) == ((1, 16) if packing == "none" else (3, 96))
    assert many["loss"] != one["loss"]
    config = tomlkit.parse((place / "run" / "config.toml").read_text())
    config["data"] |= {"corpus": "datasets", "files": ["saved"], "column": "input_ids"}
    (place / "run" / "config.toml").write_text(tomlkit.dumps(config))
    assert evaluated(capsys, "run", "--data", "a.txt")["num_tokens"] > 0, "a run on a column of a data set"


@pytest.mark.slow
def test_batches_of_another_size_give_the_same_mean_over_a_text(capsys, place):
    found = [
        evaluated(capsys, "run", "--data", "text.txt", "--set", f"batch.size={size}", "--set", "batch.length=24")
        for size in (4, 64)
    ]

    assert found[0]["num_tokens"] == found[1]["num_tokens"] == 24 * (13_501 // 24)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_find_the_same_loss_and_print_it_once_started_here_or_by_torchrun(place):
    words = ["evaluate", "run", "--to", "json", *settings("pipeline.ranks=2")]
    launched = fork([*PENSTOCK, *words], place)
    printed = [launched.communicate(timeout=120)]
    joined = fork([*TORCHRUN, "2", "-m", "penstock", *words, "--data", "text.txt"], place)
    printed.append(joined.communicate(timeout=120))

    assert (launched.returncode, joined.returncode) == (0, 0), printed
    assert json.loads(printed[0][0])["loss"] == held_out_losses(place)[6]
    assert json.loads(printed[1][0])["num_tokens"] == 16 * (13_500 // 16)


@pytest.mark.slow
def test_text_that_has_changed_since_is_refused_as_its_held_out_part_may_have_been_trained_on(capsys, refusal, place):
    with (place / "text.txt").open("a") as file:
        file.write("more")

    assert refusal("run").startswith("data.files: the text has changed since the run was trained")
    assert evaluated(capsys, "run", "--data", "text.txt")["num_batches"] > 100


def test_a_run_without_weights_and_a_missing_step_end_with_the_status_for_it(refusal, place):
    line = refusal("run", "--checkpoint", "5", status=6)
    assert line == "run: has no checkpoint of step 5; it has 3, 6"

    (place / "run" / "weights.safetensors").unlink()
    shutil.rmtree(place / "run" / "checkpoints")

    line = refusal("run", "--checkpoint", "5", status=6)
    assert line == "run: has no checkpoint of step 5; it has no checkpoint"
    line = refusal("run", status=6)
    assert line == "run: holds neither weights nor a checkpoint; a run has one as soon as it has saved one."


def test_code_that_only_the_folder_names_is_not_run(refusal, place):
    (place / "own.py").write_text("raise SystemExit('this code was run')\n")
    config = place / "run" / "config.toml"
    table = tomllib.loads(config.read_text())
    table["model"] = {"source": "own.py:layers", "loss": "own.py:loss"}
    table["data"] |= {"source": "own.py:batches", "files": []}
    config.write_text(tomlkit.dumps(table))

    line = refusal("run", "--function", "own.py:layers")

    flags = "--function own.py:layers --function own.py:loss --function own.py:batches"
    assert line.startswith("model.loss: this run uses Python code, 'own.py:loss' (model.loss), 'own.py:batches' (data.")
    assert line.endswith(f"If you trust these files, name them: {flags}")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["run", "--function", "own.py:f"], 1, "--function: got 'own.py:f', which the run does not use; leave it out"),
        (["."], 1, "RUN_FOLDER: . holds no config.toml; give the folder of a run"),
        (["run", "--set", "run.evaluate_batches=0"], 1, "run.evaluate_batches: the run holds out nothing"),
        (["run", "--set", "model.width=32"], 6, "is of another model or tokenizer"),
        (["run", "--data", "short.txt"], 1, "one sequence of batch.length = 16 needs 17"),
    ],
)
def test_wrong_arguments_are_refused_by_their_name(refusal, place, arguments, status, text):
    (place / "short.txt").write_text("short")

    assert text in refusal(*arguments, status=status)
