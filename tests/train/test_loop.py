"""A whole run: it learns, and leaves behind what it promises."""

import gzip
import json

import pytest
from safetensors.torch import load_file

from penstock.cli.entry import main
from penstock.errors import ConfigError, PenstockError
from penstock.lowering import lower
from penstock.schedules import build
from penstock.train.data.dataset import TokenDataset
from penstock.train.settings.config import load_config
from penstock.train.watching.recorded_step import read_recorded_step
from tests.train.settings.tables import merged
from tests.train.tiny_runs import save_tokenizer, tiny_table, trained

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("it is a pipeline, and a pipeline is a row of stages. " * 40)
    return path


def table_of(folder, text, **changes):
    steps = {"steps": STEPS, "evaluate_every": 4, "evaluate_batches": 2, "record_step": 3}
    model = {"width": 32, "layers": 2, "hidden": 48}
    return merged(tiny_table(folder, text, run=steps, model=model, optimizer={"learning_rate": 1e-2}), changes)


def run(folder, text, **changes):
    return trained(table_of(folder, text, **changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run")
    return folder, *run(folder, text)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_ends_with_the_text_that_its_model_writes_which_generate_repeats(tmp_path, text, capsys):
    sample = {"prompt": "it is ", "tokens": 7, "temperature": 0.5}

    _, printed = run(tmp_path / "run", text, sample=sample, optimizer={"learning_rate": 3e-2}, run={"steps": 40})

    last = printed.rpartition("\nsample:\n")[2]
    assert last.startswith("it is ")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "it is "]) == 0
    assert capsys.readouterr().out == last
    assert main(["generate", str(tmp_path / "run"), "--prompt", "it is ", "--tokens", "2", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "it is a \n"


def test_the_loss_falls_from_a_guess_and_each_step_has_its_row_with_evaluation_and_bubble_where_they_are_due(finished):
    folder, result, _ = finished

    rows = rows_of(folder)
    assert rows[0]["loss"] == pytest.approx(5.55, abs=0.1)  # log(256)
    assert rows[-1]["loss"] == result.loss < rows[0]["loss"] - 0.5
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 6]
    assert [row["step"] for row in rows if "bubble_fraction" in row] == [3]
    assert [row["step"] for row in rows if "predicted_bubble_fraction" in row] == [3]
    assert [row["step"] for row in rows if "peak_bytes_rank0" in row] == [6]
    assert not [row for row in rows if "model_flops_utilization" in row]  # no one knows the peak of a CPU
    assert rows[-1]["held_out_loss"] == result.held_out_loss < 5.2
    assert {row["num_tokens"] for row in rows} == {64}


@pytest.mark.feature("H1")
def test_a_run_whose_activations_wait_on_the_host_has_the_same_losses(tmp_path, text):
    pipeline = {"schedule": "gpipe", "microbatches": 4}
    losses = []
    for name, offload, one_stream in (("plain", [], False), ("moved", [0], False), ("in order", [0], True)):
        folder, debug = tmp_path / name, {"one_stream": one_stream}
        run(folder, text, pipeline=pipeline | {"offload": offload}, run={"steps": 2}, debug=debug)
        losses.append([row["loss"] for row in rows_of(folder)])
        timeline = read_recorded_step(folder)
        assert any("OFFLOAD" in str(row) for row in timeline.program[0]) is bool(offload)

    assert losses[0] == losses[1] == losses[2]


@pytest.mark.feature("H7")
def test_the_folder_holds_all_that_is_promised(finished):
    folder, result, _ = finished

    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "schedule.csv",
        "summary.json",
        "timeline.html",
        "timeline.json",
        "timeline.png",
        "timeline.trace.json",
        "tokens",
        "weights.safetensors",
    ]
    assert load_config(folder / "config.toml").run.record_step == 3
    assert (folder / "schedule.csv").read_text().strip() == "0F0,0B0,0F1,0B1"
    assert len(load_file(folder / "weights.safetensors")) == 3 + 2 * 9
    assert json.loads((folder / "summary.json").read_text())["held_out_loss"] == result.held_out_loss
    recorded = read_recorded_step(folder)
    assert (recorded.step, recorded.layers_of_stage) == (3, (range(5),))
    assert recorded.end_s.tolist() == result.timeline.end_s.tolist()
    assert recorded.prologues == result.timeline.prologues


@pytest.mark.feature("F4")
def test_the_lines_tell_what_is_trained_how_it_went_and_where_to_look(finished):
    folder, result, printed = finished

    assert printed.splitlines()[:4] == [
        f"run folder: {folder} (holds no run yet)",
        "1 rank on CPU; precision float32",
        "preparing the text ...",
        "building the model ...",
    ]
    assert printed.splitlines()[4].endswith("1f1b on 1 rank, 2 microbatches, 6 steps")
    assert [line.split()[:4] for line in (printed.splitlines()[5], printed.splitlines()[7])] == [
        ["stage", "layers", "weight", "parameters"],
        ["0", "5", "100.0%", "31,904"],
    ]
    assert printed.count("heaviest: stage 0") == 1
    assert "step 6/6" in printed
    assert f"held-out loss {result.held_out_loss:.4f} nats per token" in printed
    assert "\nrank  computing  bubble  predicted  most memory\n" in printed
    assert f"In {folder}:" in printed


def test_a_run_may_do_without_evaluation_record_and_files_of_metrics_but_a_prompt_has_tokens(tmp_path, text):
    bare = {"evaluate_batches": 0, "record_step": 0, "steps": 2}
    path = save_tokenizer(tmp_path / "words.json", {"it": 0, "[UNK]": 1}, unknown="[UNK]")
    words = {"data": {"tokenizer": path}, "model": {"vocabulary": 2}}
    with pytest.raises(ConfigError, match=r"^sample.prompt: ' ' has no tokens"):
        run(tmp_path / "words", text, sample={"prompt": " "}, run=bare, **words)
    assert not (tmp_path / "words" / "metrics.jsonl").exists()

    result, printed = run(tmp_path / "run", text, run=bare, metrics={"jsonl": False})

    assert result.held_out_loss is None
    assert result.timeline is None
    assert "held-out" not in printed
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_nothing_of_an_earlier_run_is_overwritten(tmp_path, text):
    folder = tmp_path / "run"
    with pytest.raises(PenstockError, match=r"step [2-6]: .* (nan|inf).*lower optimizer\.learning_rate, .* clip with"):
        run(folder, text, optimizer={"learning_rate": 1000.0, "weight_decay": 1e30, "clip_norm": 0.0})
    assert not (folder / "weights.safetensors").exists()
    rows = (folder / "metrics.jsonl").read_bytes()

    _, other = run(folder, text, run={"steps": 2}, debug={"log": "info"})
    _, finished = run(tmp_path / "run", text, run={"steps": 2})

    keys = "optimizer.learning_rate, optimizer.weight_decay, optimizer.clip_norm"
    assert other.startswith(f"run folder: {folder}-2 ({folder} holds an unfinished run with another {keys})\n")
    assert finished.startswith(f"run folder: {folder}-3 ({folder}-2 holds a finished run)\n")
    assert (folder / "metrics.jsonl").read_bytes() == rows
    assert len(rows_of(tmp_path / "run-2")) == 2
    assert not (tmp_path / "run-3" / "tokens").exists()


def train_as_rank(rank, table):
    result, printed = trained(table)
    return result.loss, result.held_out_loss, printed


@pytest.mark.feature("X45")
@pytest.mark.parametrize("is_program", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_processes_train_the_same_weights_bit_for_bit_and_only_rank_0_speaks(
    finished, tmp_path, text, two_ranks, is_program
):
    """Also where they run a program from a file, which is that of the same schedule."""
    whole, alone, _ = finished
    schedule, folder = build("1f1b", ranks=2, microbatches=2), tmp_path / "run"
    program = tmp_path / "program.csv"
    program.write_text(lower(schedule).to_csv())
    pipeline = {"ranks": 2, "schedule": str(program) if is_program else "1f1b"}

    results = two_ranks.run(train_as_rank, table_of(folder, text, pipeline=pipeline))

    assert [result[:2] for result in results] == [(alone.loss, alone.held_out_loss)] * 2
    assert "\n31,904 parameters, " in results[0][2]
    assert results[1][2] == ""
    found, expected = (
        [(row["loss"], row["gradient_norm"], row.get("held_out_loss")) for row in rows_of(each)]
        for each in (folder, whole)
    )
    assert found == expected
    assert (folder / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    assert (folder / "schedule.csv").read_text().split() == schedule.to_csv().split()


@pytest.mark.slow
def test_every_rank_leaves_a_profile_that_shows_the_schedule_and_trains_the_same_bits(
    finished, tmp_path, text, two_ranks
):
    changes = {"pipeline": {"ranks": 2}, "profile": {"steps": [2, 3], "memory": True}}

    results = two_ranks.run(train_as_rank, table_of(tmp_path, text, **changes))

    assert results[0][0] == finished[1].loss
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((tmp_path / f"profile-rank{rank}.json.gz").read_bytes()))
        names = [event.get("name") for event in trace["traceEvents"]]
        assert {f"Forward stage {rank} microbatch 1", f"Backward stage {rank} microbatch 0", "step 2"} <= set(names)
        assert names.count(f"Forward stage {rank} microbatch 1") == 2  # one a step
    assert "  profile-rank*.json.gz  the profiled steps of each rank" in results[0][2]


@pytest.mark.slow
def test_a_run_that_is_looked_at_trains_the_same_bits_and_leaves_a_log(tmp_path, text, finished):
    result, output = run(tmp_path, text, debug={"level": "values", "ranges": True, "log": "debug"})

    log = (tmp_path / "rank0.log").read_text()
    assert result.loss == finished[1].loss
    assert "INFO rank 0 of 1: 1f1b, 2 microbatches" in log
    assert "over all ranks" in log
    assert "rank0.log" in output


# ---- how a run ends, and what it trains with


def test_a_run_ends_early_where_the_held_out_loss_does_not_fall(tmp_path, text):
    """Without updates it stays where it is: the second evaluation in a row without a lower one ends the run."""
    changes = {"skip_updates": True, "evaluate_every": 1, "patience": 2, "record_step": 0}

    result, printed = run(tmp_path, text, run=changes)

    rows = rows_of(tmp_path)
    assert (result.num_steps, len(rows), len({row["held_out_loss"] for row in rows})) == (3, 3, 1)
    assert "stopped early: 2 evaluations in a row without a held-out loss below 5.5" in printed
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 3


def test_a_ramp_up_sees_more_tokens_from_step_to_step_and_every_window_once(tmp_path, text, monkeypatch):
    taken, batch = [], TokenDataset.batch
    monkeypatch.setattr(
        TokenDataset,
        "batch",
        lambda self, step, *more, **wants: taken.append(step) or batch(self, step, *more, **wants),
    )

    run(tmp_path, text, run={"record_step": 0}, batch={"samples": 12, "ramp_from": 1, "ramp_steps": 4})

    assert [row["num_tokens"] for row in rows_of(tmp_path)] == [64, 64, 128, 128, 192, 192]
    assert taken == list(range(12))


@pytest.mark.slow
def test_an_optimizer_and_checkpointing_of_the_run_file_are_used(tmp_path, text):
    given = {"name": "SGD", "options": {"momentum": 0.9}, "learning_rate": 0.3, "warmup_steps": 0}
    kept = {"activation_checkpointing": ["selective"]}

    plain, _ = run(tmp_path / "plain", text, optimizer=given)
    checkpointed, _ = run(tmp_path / "kept", text, optimizer=given, pipeline=kept)
    other, _ = run(tmp_path / "other", text, optimizer=given | {"options": {}})

    recomputed, _ = run(tmp_path / "again", text, optimizer=given, pipeline={"options": {"recompute": True}})

    assert plain.loss == checkpointed.loss == recomputed.loss
    assert "0R0,0B0" in (tmp_path / "again" / "schedule.csv").read_text().replace(" ", "")
    assert plain.loss != other.loss
