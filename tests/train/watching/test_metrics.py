"""The record of a run's steps."""

import io
import json
from contextlib import ExitStack
from dataclasses import replace

import pytest

from penstock.errors import FormatError, PenstockError
from penstock.train.settings.sections import MetricsSection
from penstock.train.watching.metrics import MetricsWriter, read_metrics
from penstock.train.watching.progress import StepMetrics, StepOutcome
from penstock.train.watching.utilization import Utilization


def step_of(step, duration_s=0.5, *, loss=None, data_wait_s=0.0, loss_scale=None, **optional):
    loss = 2.0 + step if loss is None else loss
    outcome = StepOutcome(loss, 0.5, 1e-3, data_wait_s=data_wait_s, loss_scale=loss_scale)
    return StepMetrics(step, outcome, 100, duration_s, **optional)


def write_all(folder, steps, num_steps=10, **options):
    output = io.StringIO()
    own = {name: options.pop(name) for name in ("utilization", "clock") if name in options}
    with ExitStack() as stack:
        writer = MetricsWriter(stack, folder, MetricsSection(**options), num_steps=num_steps, output=output, **own)
        for step in steps:
            writer.write(step)
    return output.getvalue()


def objects_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_one_json_object(tmp_path):
    write_all(tmp_path / "run", [step_of(1), step_of(2, bubble_fraction=0.25, held_out_loss=2.5)])

    first, second = objects_of(tmp_path / "run")
    assert first == {
        "step": 1,
        "loss": 3.0,
        "num_tokens": 100,
        "tokens_per_s": 200.0,
        "duration_s": 0.5,
        "data_wait_s": 0.0,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "left_s": 4.5,
    }
    assert (second["bubble_fraction"], second["held_out_loss"]) == (0.25, 2.5)


@pytest.mark.feature("X4")
def test_what_was_measured_of_the_ranks_has_a_number_for_each_and_utilization_follows_from_tokens(tmp_path):
    step = step_of(1, peak_bytes=(7, 5), data_wait_s=0.25, bubble_fraction=0.2, predicted_bubble_fraction=0.1)
    write_all(tmp_path / "run", [step])

    [row] = objects_of(tmp_path / "run")
    assert (row["peak_bytes_rank0"], row["peak_bytes_rank1"], row["data_wait_s"]) == (7, 5, 0.25)
    assert row["predicted_bubble_fraction"] == 0.1
    assert "model_flops_utilization" not in row
    write_all(tmp_path, [step_of(1)], num_steps=2, utilization=Utilization(flops_per_token=6.0, flops_per_s=2400.0))
    assert objects_of(tmp_path)[0]["model_flops_utilization"] == 0.5


def test_recorded_steps_do_not_count_in_tokens_per_second_and_what_is_left(tmp_path):
    recorded = step_of(1, duration_s=4.0, bubble_fraction=0.2, is_slowed=True)
    write_all(tmp_path / "run", [recorded, step_of(2), replace(recorded, step=3), step_of(4, duration_s=0.25)])

    rows = objects_of(tmp_path / "run")
    assert [row["tokens_per_s"] for row in rows] == [25.0, 200.0, 200.0, 300.0]
    assert [row["left_s"] for row in rows] == [36.0, 4.0, 3.5, 3.0]
    assert [row["duration_s"] for row in rows] == [4.0, 0.5, 4.0, 0.25]


def test_compiling_steps_do_not_count_and_alone_leave_open_what_is_left(tmp_path):
    compiling = step_of(1, duration_s=40.0, has_compiled=True)
    shown = write_all(
        tmp_path / "run",
        [compiling, replace(compiling, step=2, is_slowed=True), step_of(3), replace(compiling, step=4)],
    )

    rows = objects_of(tmp_path / "run")
    assert ["left_s" in row for row in rows] == [False, False, True, True]
    assert [row["left_s"] for row in rows[2:]] == [3.5, 3.0]
    assert [row["tokens_per_s"] for row in rows] == [2.5, 2.5, 200.0, 200.0]
    assert "left -" in shown.splitlines()[0]
    write_all(tmp_path / "one", [step_of(1, has_compiled=True)], num_steps=1)
    assert objects_of(tmp_path / "one")[0]["left_s"] == 0.0
    write_all(tmp_path / "slow", [step_of(1, 9.0), step_of(2, 1.0), step_of(3, 1.0)])
    assert objects_of(tmp_path / "slow")[-1]["left_s"] == 7.0, "one slow step hardly moves it"


def test_terminal_shows_first_last_due_and_evaluated_steps_and_the_folder_what_is_asked_for(tmp_path):
    steps = [step_of(step, held_out_loss=1.0 if step == 3 else None) for step in range(1, 11)]

    shown = write_all(tmp_path, steps, every=4)

    assert [int(line.split()[1].split("/")[0]) for line in shown.splitlines()] == [1, 3, 4, 8, 10]
    assert len(objects_of(tmp_path)) == 10
    assert write_all(tmp_path / "none", [step_of(1)], jsonl=False).startswith("step  1/10  loss 3.0000")
    assert not (tmp_path / "none" / "metrics.jsonl").exists()
    with pytest.raises(PenstockError, match=r"metrics\.jsonl/run: cannot be written: Not a directory"):
        write_all(tmp_path / "metrics.jsonl" / "run", [])


def test_a_pipe_gets_a_line_every_few_seconds(tmp_path):
    """Steps of 0.5 s: the first, every tenth after it, the last."""
    now_s = [0.0]

    def steps():
        for step in range(1, 36):
            now_s[0] += 0.5
            yield step_of(step)

    shown = write_all(tmp_path, steps(), num_steps=35, clock=lambda: now_s[0])

    assert [int(line.split()[1].split("/")[0]) for line in shown.splitlines()] == [1, 11, 21, 31, 35]


def test_metrics_are_appended_to_and_the_last_line_of_a_step_counts(tmp_path):
    write_all(tmp_path, [step_of(1), step_of(2), step_of(3)])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":4,"lo')  # killed

    write_all(tmp_path, [step_of(3, loss=7.0), step_of(4, loss=float("nan"))])

    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (rows[2]["loss"], rows[3]["gradient_norm"]) == (7.0, 0.5)
    assert "loss" not in rows[3], "a number that was not finite is left out"


@pytest.mark.parametrize("line", ["step 2", "[1]", '{"loss":2.0}', '{"step":2,"loss":"low"}', '{"step":2.5}', "null"])
def test_a_line_that_is_no_step_is_named(tmp_path, line):
    write_all(tmp_path, [step_of(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")

    with pytest.raises(FormatError, match="not the numbers of a step") as caught:
        read_metrics(tmp_path / "metrics.jsonl")

    assert caught.value.line == 2


def test_people_see_the_last_measured_bubble_and_memory_and_the_files_only_what_was_measured(tmp_path):
    steps = [step_of(1), step_of(2, bubble_fraction=0.25, peak_bytes=(2**30,)), step_of(3)]

    lines = write_all(tmp_path, steps, num_steps=3, every=1).splitlines()

    assert ["memory 1.00 GiB" in line for line in lines] == [False, True, True]
    assert [("bubble     -" in line, "bubble 25.0%" in line) for line in lines] == [(True, False), *[(False, True)] * 2]
    rows = objects_of(tmp_path)
    assert ["bubble_fraction" in row for row in rows] == [False, True, False]
