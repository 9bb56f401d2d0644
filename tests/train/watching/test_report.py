"""The first lines of a run, and its report: figures, trace, picture, and lines that say where they are."""

import json
import re
import sys
from contextlib import closing
from dataclasses import replace

import pytest

from penstock.ir.instruction import Op
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from penstock.show import page
from penstock.simulation import Costs, simulate
from penstock.tables import NO_SCREEN, Screen
from penstock.train.folder.run_folder import RunFolder
from penstock.train.watching.report import TrainingResult, device_line, opening_lines, write_report
from tests.support.local_pipelines import on_ranks
from tests.train.local_ranks import small_layers, small_pipeline
from tests.train.settings.tables import config_with, merged

RESULT = TrainingResult(num_steps=40, loss=1.5, held_out_loss=1.75, timeline=None)


def measured_timeline():
    program = lower(build("1f1b", ranks=2, microbatches=4))
    played = simulate(program, Costs.uniform(forward=1e-3, backward=2e-3, transfer=1e-4))
    return Timeline(program, "measured", played.start_s, played.end_s, played.sizes)


def report_lines(folder, result=RESULT, measured=None, **options):
    timeline = measured and replace(measured, step=20)
    return list(write_report(RunFolder(folder), replace(result, timeline=timeline), 65.0, **options))


@pytest.mark.feature("H7")
def test_the_report_holds_figures_trace_and_picture_and_its_lines_name_the_files_that_are_there(tmp_path):
    measured = measured_timeline()
    (tmp_path / "tensorboard").mkdir()

    text = "\n".join(report_lines(tmp_path, measured=measured))

    assert "held-out loss 1.7500 nats per token, loss 1.5000, 40 steps in 1:05" in text
    assert "measured:  makespan" in text
    for name in ("summary.json", "timeline.png", "timeline.html", "timeline.trace.json"):
        assert f"  {name} " in text
    assert f"tensorboard --logdir {tmp_path / 'tensorboard'}" in text
    assert "weights.safetensors" not in text

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["loss"], summary["held_out_loss"], summary["recorded_step"]) == (1.5, 1.75, 20)
    seconds = summary["timelines"]["measured"].pop("seconds_by_operation")
    assert [of_rank["forward"] for of_rank in seconds] == [each[Op.FORWARD] for each in measured.seconds_by_op()]
    summary["timelines"]["predicted"].pop("seconds_by_operation")
    assert summary["timelines"]["measured"] == {
        "makespan_s": measured.makespan_s,
        "span_s": measured.span_s,
        "bubble_fraction": measured.bubble_fraction,
        "bubble_rate": measured.bubble_rate,
    }
    assert summary["timelines"]["predicted"].keys() == summary["timelines"]["measured"].keys()
    events = json.loads((tmp_path / "timeline.trace.json").read_text())["traceEvents"]
    assert {event["args"]["timeline"] for event in events if event["ph"] == "X"} == {"predicted", "measured"}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_each_rank_measured_above_predicted(tmp_path):
    report_lines(tmp_path, measured=measured_timeline())

    text = (tmp_path / "timeline.html").read_text()
    header = json.loads(re.search(r'^start\((.*), "[A-Za-z0-9+/=]*"\);$', text, re.MULTILINE)[1])
    assert [(lane["name"], lane["is_pale"]) for lane in header["lanes"]] == [
        ("0 measured", False), ("0 predicted", True), ("1 measured", False), ("1 predicted", True),
    ]  # fmt: skip
    assert "step 20: measured above predicted" in text


def table_in(lines):
    """The rows of the table of ranks, each as its words."""
    found = [line for line in lines if line.startswith("\nrank")]
    return [row.split() for row in found[0].strip().splitlines()] if found else []


def test_a_row_per_rank_tells_what_it_took_also_of_other_ranks_and_fits_the_terminal(tmp_path):
    result = replace(RESULT, peak_bytes=(1 << 20, 3 << 20, 2 << 20))

    heading, _, *rows = table_in(report_lines(tmp_path, result, measured_timeline()))

    assert heading == ["rank", "computing", "bubble", "predicted", "most", "memory"]
    # 12 ms of 15.4 ms, in which the other rank has a pair to itself, and four transfers
    assert rows == [
        ["0", "12.0", "ms", "22.1", "%", "22.1", "%", "1.00", "MiB"],
        ["1", "12.0", "ms", "22.1", "%", "22.1", "%", "3.00", "MiB"],
        ["2", "2.00", "MiB"],
    ]
    assert table_in(report_lines(tmp_path)) == []
    assert [row[0] for row in table_in(report_lines(tmp_path, result))][2:] == ["0", "1", "2"]
    narrow = report_lines(tmp_path, result, measured_timeline(), screen=Screen(30))
    [table] = [line for line in narrow if line.startswith("\nrank")]
    assert max(map(len, table.splitlines())) <= 30


def test_what_the_clocks_of_several_hosts_leave_uncertain_is_told(tmp_path):
    for uncertainty_s, told in ((12e-6, ["measured"]), (0.0, [])):
        lines = report_lines(tmp_path, measured=replace(measured_timeline(), clock_uncertainty_s=uncertainty_s))
        uncertain = [line for line in lines if "times of different hosts within 12.0 µs of each other" in line]
        assert [line.partition(":")[0] for line in uncertain] == told


def test_without_matplotlib_and_of_a_step_that_no_page_holds_one_line_says_why_a_file_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MAX_BLOCKS", 3)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    lines = report_lines(tmp_path, measured=measured_timeline())

    [line] = [line for line in lines if "timeline.png" in line]
    assert line.startswith("timeline.png was not made: ")
    assert "pip install" in line
    assert len([line for line in lines if line.startswith("timeline.html was not made: ")]) == 1
    assert (tmp_path / "timeline.trace.json").exists()


def test_without_a_recorded_step_there_is_a_summary_only_which_counts_the_steps_that_took_the_time(tmp_path):
    text = "\n".join(report_lines(tmp_path, replace(RESULT, held_out_loss=None)))

    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text())["timelines"] == {}
    assert "held-out" not in text
    continued = report_lines(tmp_path, replace(RESULT, num_earlier=15))
    assert "loss 1.5000, 25 of 40 steps in 1:05" in "\n".join(continued)


def config_of(**sections):
    tiny = {"run": {"steps": 6, "device": "cpu", "record_step": 0}, "pipeline": {"ranks": 1, "microbatches": 4}}
    return config_with(**merged(tiny, sections))


def lines_of(config=None, note="", screen=NO_SCREEN, **options):
    layers = small_layers()
    with closing(Pipeline(layers, microbatches=4, **options)) as pipeline:
        return list(opening_lines(config or config_of(), layers, 1234, pipeline, note, screen))


def parameters_drawn(split):
    rows = [line.split() for line in split.splitlines()]
    return sum(int(row[3].replace(",", "")) for row in rows if row[0].isdecimal())


@pytest.mark.feature("F4")
def test_the_parameters_of_the_stages_add_up_to_those_of_the_first_line():
    layers = small_layers(tied_head=True)

    def case(transport):
        with closing(small_pipeline(transport, layers, stages_per_rank=2, schedule="interleaved-1f1b")) as pipeline:
            return list(opening_lines(config_of(), layers, 1234, pipeline, "", NO_SCREEN))[:2]

    (summary, on_one), *_ = on_ranks(1, case)
    (_, on_two), *_ = on_ranks(2, case)

    total = summary.split(" parameters")[0]
    assert f"{parameters_drawn(on_one):,}" == total
    assert on_one.endswith("tied on one rank: 512 parameters of stage 0 in stage 1, counted once")
    assert f"{parameters_drawn(on_two) - 512:,}" == total
    assert on_two.endswith(f"512 parameters of stage 0 in stage 3, counted in each\nwithout copies: {total} parameters")


def test_notes_follow_the_split_and_fit_the_terminal(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    recorded = config_of(run={"record_step": 2})

    *_, note, missing = lines_of(recorded, note="the split uses measured seconds", screen=Screen(40))

    assert note == "the split uses measured seconds"
    assert missing.startswith("note: there will be no picture of step\n2: ")
    assert max(map(len, missing.splitlines())) <= 40


def test_the_first_lines_tell_device_precision_model_text_and_split_and_note_a_type_that_this_cpu_emulates(monkeypatch):
    seconds_of = {"torch.float32": 1.0, "torch.bfloat16": 4.0}
    name = "penstock.train.optimizing.precision._product_s"
    monkeypatch.setattr(name, lambda dtype: seconds_of[str(dtype)])

    summary, split = lines_of()
    *_, note = lines_of(config_of(precision={"compute": "bfloat16"}))
    two = config_of(pipeline={"ranks": 2}, precision={"compute": "bfloat16", "autocast": True})

    assert note.startswith("note: bfloat16 is slower than float32 on this CPU: 4.0 times")
    assert summary.endswith("parameters, 1,234 tokens to train on, 1f1b on 1 rank, 4 microbatches, 6 steps")
    assert "heaviest: stage 0" in split
    assert device_line(config_of()) == "1 rank on CPU; precision float32"
    assert device_line(two) == "2 ranks on CPU, backend gloo; precision bfloat16 by autocast"
