"""A recorded step reads back to the last bit, and a broken one says what is wrong with it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, FormatError
from penstock.execute.split.planner import ImmediateWeights
from penstock.ir.timeline import DataWait, Timeline
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation.prologue import Prologue
from penstock.train.watching.recorded_step import (
    RecordedStep,
    read_recorded_step,
    recorded_step_from_json,
    recorded_step_to_json,
)
from tests.strategies import schedules


def recorded_step(schedule, seed=0):
    """Random times, which a real step would not have: only their bits matter here."""
    program, chance = lower(schedule), np.random.default_rng(seed)
    start_s = chance.random(program.num_instructions)
    end_s = start_s + chance.random(program.num_instructions)
    waits = [DataWait(rank, 0, *np.sort(chance.random(2) - 1).tolist()) for rank in range(program.num_ranks)]
    uncertainty_s = chance.random()
    timeline = Timeline(
        program,
        "measured",
        start_s,
        end_s,
        clock_uncertainty_s=uncertainty_s,
        data_waits=tuple(waits[::2]),
    )
    stages = range(program.num_stages)
    moments = np.sort(chance.random((program.num_ranks, 3)) - 2)
    return RecordedStep(
        7,
        timeline,
        tuple(chance.integers(0, 99, program.num_stages).tolist()),
        tuple(range(2 * stage, 2 * stage + 2) for stage in stages),
        tuple(chance.random(2 * len(stages)).tolist()),
        tuple(Prologue(*row) for row in moments.tolist()),
        num_replicas=1 + seed % 3,
    )


def plain(recorded):
    """Everything of it in values that compare."""
    timeline = recorded.timeline
    times = (timeline.start_s.tolist(), timeline.end_s.tolist(), timeline.clock_uncertainty_s, timeline.source)
    layers = (recorded.layers_of_stage, recorded.layer_weights)
    others = (recorded.message_bytes, recorded.prologues, recorded.step, recorded.num_replicas)
    return times, timeline.data_waits, layers, others


@given(schedules(), st.integers(0, 2**32))
def test_what_is_written_reads_back_to_the_last_bit(schedule, seed):
    recorded = recorded_step(schedule, seed)

    found = recorded_step_from_json(recorded_step_to_json(recorded))

    assert found.timeline.program == recorded.timeline.program
    assert plain(found) == plain(recorded)


def test_early_weight_gradients_read_back():
    early = {
        1: ImmediateWeights(
            0.1 + 0.2, ("1.weight", "2.weight"), {"1.weight": "small", "2.weight": "cannot be told apart"}
        )
    }
    recorded = replace(recorded_step(build("zb-h1", ranks=2, microbatches=4)), early_weights=early)

    assert recorded_step_from_json(recorded_step_to_json(recorded)).early_weights == early


def test_files_of_before_there_were_reasons_are_read():
    early = {1: ImmediateWeights(0.5, ("1.weight",))}
    recorded = replace(recorded_step(build("zb-h1", ranks=2, microbatches=4)), early_weights=early)
    document = json.loads(recorded_step_to_json(recorded))
    del document["early_weights"][0]["reasons"]
    document["early_weights"][0]["rungs"] = {"opaque": 0.5, "product": 0.5}

    assert recorded_step_from_json(json.dumps(document).encode()).early_weights == early


def test_a_file_of_before_waits_for_data_were_kept_has_none(small):
    document = json.loads(small)
    assert len(document.pop("data_waits")) == 1

    found = recorded_step_from_json(json.dumps(document).encode())

    assert found.timeline.data_waits == ()
    assert found.prologues == recorded_step_from_json(small).prologues


def wait(rank=0, microbatch=0, begin_s=-1.0, end_s=2.0):
    return {"rank": rank, "microbatch": microbatch, "begin_s": begin_s, "end_s": end_s}


@pytest.fixture
def folder(tmp_path, small):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "timeline.json").write_bytes(small)
    return tmp_path


@pytest.fixture
def small():
    return recorded_step_to_json(recorded_step(build("1f1b", ranks=2, microbatches=2)))


def test_a_run_folder_gives_its_recorded_step(folder):
    assert read_recorded_step(folder).step == 7


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("timeline.json", r"holds no timeline\.json: the run has not come to its recorded step.*run\.record_step"),
        ("config.toml", r"holds no config\.toml, so it is no run folder"),
    ],
)
def test_an_incomplete_folder_names_what_is_missing(folder, missing, told):
    (folder / missing).unlink()

    with pytest.raises(ConfigError, match=told):
        read_recorded_step(folder)


def test_what_is_no_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is no folder; give the run folder"):
        read_recorded_step(tmp_path / "nowhere")


def test_a_file_that_was_cut_short_says_so(folder):
    path = folder / "timeline.json"
    path.write_bytes(path.read_bytes()[:500])

    with pytest.raises(FormatError, match=r"timeline\.json:1:\d+: this is no JSON: .*cut short.*Record the step again"):
        read_recorded_step(folder)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("start_s", [0.0], "start_s: 1 entries, but 18 belong there"),
        ("message_bytes", [1, 2, 3], "message_bytes: 3 entries, but 2 belong there"),
        ("layer_weights", [], "layer_weights: 0 entries, but 4 belong there"),
        ("lead_ins", [[0.0, 1.0, 0.5]] * 2, "goes back in time"),
        ("lead_ins", [[0.0, 1.0, 2.0]], "lead_ins: 1 entries, but 2 belong there"),
        ("lead_ins", [[0.0]] * 2, r"lead_ins\.0: "),
        ("data_waits", [wait(rank=2)], r"data_waits\.0: rank 2, microbatch 0, but there are 2 ranks and 2 m"),
        ("data_waits", [wait(), wait(1, 2)], r"data_waits\.1: rank 1, microbatch 2, but there are"),
        ("data_waits", [wait(begin_s=3.0)], r"data_waits\.0: from 3\.0 to 2\.0 s, which goes back in time"),
        ("data_waits", [wait(), wait(1), wait(0, 1)], r"data_waits\.2: from -1\.0 to 2\.0 s, which goes back"),
        ("data_waits", [{"rank": 0}], r"data_waits\.0\.microbatch: "),
        ("early_weights", [{"stage": 2, "share": 0.5, "names": []}], "early_weights: stage 2, but there are 2"),
        ("early_weights", [{"stage": 0, "share": 1.5, "names": []}], r"early_weights\.0\.share: "),
        ("step", 0, "step: "),
        ("version", 2, "version: "),
        ("end_s", None, "end_s: "),
        ("program", {}, "the key"),
        ("more", 1, "more: "),
    ],
)
def test_a_part_that_is_wrong_is_named(small, key, value, told):
    document = json.loads(small) | {key: value}

    with pytest.raises(FormatError, match=rf"file\.json.*{told}"):
        recorded_step_from_json(json.dumps(document).encode(), file="file.json")
