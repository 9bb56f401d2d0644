"""A timeline reads back to the last bit, and a broken one says what is wrong with it."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.ir.live import StageBytes
from penstock.ir.measured import HostTimes, ImmediateWeights, Prologue
from penstock.ir.timeline import DataWait, Timeline
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.support.strategies import schedules


def recorded_step(schedule, seed=0):
    """Random times, which a real step would not have: only their bits matter here."""
    program, chance = lower(schedule), np.random.default_rng(seed)
    start_s = chance.random(program.num_instructions)
    waits = [DataWait(rank, 0, *np.sort(chance.random(2) - 1).tolist()) for rank in range(program.num_ranks)]
    stages = range(program.num_stages)
    moments = np.sort(chance.random((program.num_ranks, 3)) - 2)
    return Timeline(
        program,
        "measured",
        start_s,
        start_s + chance.random(program.num_instructions),
        clock_uncertainty_s=chance.random(),
        data_waits=tuple(waits[::2]),
        step=7,
        message_bytes=tuple(chance.integers(0, 99, program.num_stages).tolist()),
        layers_of_stage=tuple(range(2 * stage, 2 * stage + 2) for stage in stages),
        layer_weights=tuple(chance.random(2 * len(stages)).tolist()),
        prologues=tuple(Prologue(*row) for row in moments.tolist()),
        early_weights={0: ImmediateWeights(0.1 + 0.2, ("0.weight", "1.weight"), {"0.weight": "small"})},
        num_replicas=1 + seed % 3,
        host=HostTimes(*chance.random((4, program.num_instructions))) if seed % 2 else None,
    )


def plain(value):
    """Return all columns of a timeline in values that compare; NaN and -0.0 show in their text."""
    if isinstance(value, Timeline | StageBytes):
        return {column.name: plain(getattr(value, column.name)) for column in fields(value)}
    if isinstance(value, HostTimes):
        return {name: plain(column) for name, column in value._asdict().items()}
    return (str(value.dtype), list(map(repr, value.tolist()))) if isinstance(value, np.ndarray) else value


@given(schedules(), st.integers(0, 2**32))
def test_what_is_written_reads_back_to_the_last_bit(schedule, seed):
    recorded = recorded_step(schedule, seed)

    assert plain(Timeline.from_json(recorded.to_json())) == plain(recorded)


@pytest.mark.parametrize("factors", [None, (1.0, 0.5, 0.25, 1.0)])
@pytest.mark.parametrize("workspaces", [{}, {"backward_workspace_bytes": (5, 6)}])
def test_a_predicted_timeline_reads_back_with_its_sizes(factors, workspaces):
    costs = Costs.uniform(activation_bytes=(2**40, 3), message_bytes=(7, 0), **workspaces)
    timeline = simulate(lower(build("1f1b", ranks=2, microbatches=4)), costs)
    factor = None if factors is None else np.array(factors)
    timeline = replace(timeline, sizes=replace(timeline.sizes, microbatch_factor=factor))

    found = Timeline.from_json(timeline.to_json())

    assert plain(found) == plain(timeline)
    assert (found.source, found.peak_bytes) == ("predicted", timeline.peak_bytes)
    # A Penstock that knows no workspaces reads files without any.
    assert ("backward_workspace" in json.loads(timeline.to_json())["sizes"]) == bool(workspaces)


def test_files_of_before_there_were_reasons_are_read():
    early = {1: ImmediateWeights(0.5, ("1.weight",))}
    recorded = replace(recorded_step(build("zb-h1", ranks=2, microbatches=4)), early_weights=early)
    document = json.loads(recorded.to_json())
    del document["early_weights"][0]["reasons"]
    document["early_weights"][0]["rungs"] = {"opaque": 0.5, "product": 0.5}

    assert Timeline.from_json(json.dumps(document)).early_weights == early


@pytest.mark.feature("H7")
def test_hosts_have_their_times_and_rows_their_lanes_and_files_of_before_have_neither():
    recorded = recorded_step(build("1f1b", ranks=2, microbatches=2), seed=1)
    document = json.loads(recorded.to_json())

    lanes = dict(zip(map(str, recorded.program[0]), document["lanes"], strict=False))
    expected = {"0F0": "compute", "0SEND_F0": "send", "0RECV_B0": "receive", "0REDUCE_GRAD": "collective"}
    assert {text: lanes[text] for text in expected} == expected
    assert document["host"]["wait_end_s"] == recorded.host.wait_end_s.tolist()
    for host, told in (({}, "host.start_s: this key is missing"), ({**document["host"], "end_s": [0.0]}, "1 entries")):
        with pytest.raises(FormatError, match=told):
            Timeline.from_json(json.dumps(document | {"host": host}))
    for key in ("host", "lanes"):
        del document[key]
    assert Timeline.from_json(json.dumps(document)).host is None


def test_a_file_of_before_waits_for_data_were_kept_has_none(small):
    document = json.loads(small)
    assert len(document.pop("data_waits")) == 1

    found = Timeline.from_json(json.dumps(document))

    assert found.data_waits == ()
    assert found.prologues == Timeline.from_json(small).prologues


def test_a_timeline_of_which_nothing_else_is_known_reads_back():
    timeline = Timeline(lower(build("gpipe", ranks=1, microbatches=1)), "measured", np.zeros(3), np.ones(3))

    assert plain(Timeline.from_json(timeline.to_json())) == plain(timeline)


def wait(rank=0, microbatch=0, begin_s=-1.0, end_s=2.0):
    return {"rank": rank, "microbatch": microbatch, "begin_s": begin_s, "end_s": end_s}


def sizes(**changed):
    columns = ("activation", "weight_context", "checkpoint", "message", "static", "weights", "gradient")
    return {name: [1, 2] for name in columns} | {"microbatch_factor": None, "not_given": []} | changed


@pytest.fixture
def small():
    return recorded_step(build("1f1b", ranks=2, microbatches=2)).to_json()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("start_s", [0.0], "start_s: 1 entries, but 18 belong there"),
        ("end_s", [0.0] * 17 + [float("inf")], r"this is no JSON"),
        ("end_s", None, "end_s: null is no list"),
        ("message_bytes", [1, 2, 3], "message_bytes: 3 entries, but 2 belong there"),
        ("layers_of_stage", [[0, 2], [2, 2]], r"layers_of_stage\[1\]: expected the first layer"),
        ("lead_ins", [[0.0, 1.0, 0.5]] * 2, "goes back in time"),
        ("lead_ins", [[0.0]] * 2, r"lead_ins\[0\]: 1 moments; expected 3"),
        ("data_waits", [wait(rank=2)], r"data_waits\[0\]: rank 2, microbatch 0, but there are 2 ranks and 2 m"),
        ("data_waits", [wait(), wait(1, 2)], r"data_waits\[1\]: rank 1, microbatch 2, but there are"),
        ("data_waits", [wait(begin_s=3.0)], r"data_waits\[0\]: from 3\.0 to 2\.0 s, which goes back in time"),
        ("data_waits", [wait(), wait(1), wait(0, 1)], r"data_waits\[2\]: from -1\.0 to 2\.0 s, which goes back"),
        ("early_weights", [{"stage": 2, "share": 0.5, "names": []}], "stage: stage 2, but there are 2"),
        ("early_weights", [{"stage": 0, "share": 1.5, "names": []}], r"early_weights\[0\]\.share: expected a finite"),
        ("early_weights", [{"stage": 0, "share": 0.5, "names": [1]}], r"early_weights\[0\]\.names: 1 is no text"),
        ("step", -1, "step: expected a whole number"),
        ("num_replicas", 0, "num_replicas: expected a whole number from 1"),
        ("clock_uncertainty_s", -1.0, "clock_uncertainty_s: expected a finite number, 0 or more"),
        ("layer_weights", [1.0, -1.0, 1.0, 1.0], r"layer_weights\[1\]: expected a finite number, 0 or more"),
        ("version", 2, "version: a newer Penstock wrote version 2; this one reads 1, so update it"),
        ("version", 0, "version: there is no such version; expected 1"),
        ("sizes", {"activation": [1, 2]}, r"sizes\.weight_context: this key is missing"),
        ("format", "penstock-schedule", "format: this is no timeline; expected 'penstock-recorded-step'"),
        ("source", "guessed", "source: expected one of untimed, predicted, measured"),
        ("sizes", sizes(static=[1]), r"sizes\.static: 1 entries, but 2 belong there"),
        ("sizes", sizes(activation=[1, -2]), r"sizes\.activation\[1\]: -2 does not fit"),
        ("sizes", sizes(microbatch_factor=[1.0]), r"sizes\.microbatch_factor: 1 entries, but 2 belong there"),
        ("program", {}, "the key"),
        ("more", 1, "more: there is no such key"),
    ],
)
def test_a_part_that_is_wrong_is_named_in_one_line(small, key, value, told):
    document = json.loads(small) | {key: value}

    with pytest.raises(FormatError, match=rf"file\.json.*{told}") as caught:
        Timeline.from_json(json.dumps(document), file="file.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "step 20", '{"format": "penstock-program"}'])
def test_what_is_no_timeline_is_refused(text):
    with pytest.raises(FormatError, match=r"file\.json:1:\d+: "):
        Timeline.from_json(text, file="file.json")
