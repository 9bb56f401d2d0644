"""The trace file, by the rules of the Trace Event Format."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.measured import HostTimes
from penstock.ir.timeline import DataWait
from penstock.lowering import lower
from penstock.schedules import build
from penstock.show.trace import to_trace
from penstock.simulation import Costs, simulate
from tests.show.timelines import timeline_of

PREDICTED, MEASURED = timeline_of(3, 5), timeline_of(3, 5, "gpipe")


@pytest.fixture(scope="module")
def events():
    return json.loads(to_trace({"predicted": PREDICTED, "measured": MEASURED}))["traceEvents"]


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def threads_of(events):
    """The names of threads, by rank and number."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(events, "M") if e["name"] == "thread_name"}


def test_ranks_are_processes_every_row_is_one_slice_on_them_and_computations_share_one_thread(events):
    names = {e["pid"]: e["args"]["name"] for e in of_phase(events, "M") if e["name"] == "process_name"}

    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    found = Counter((e["args"]["timeline"], e["pid"], e["name"]) for e in of_phase(events, "X"))
    expected = Counter(
        (name, rank, str(instruction))
        for name, timeline in (("predicted", PREDICTED), ("measured", MEASURED))
        for rank in range(3)
        for instruction in timeline.program[rank]
    )
    assert found == expected
    threads = {(e["pid"], e["tid"]) for e in of_phase(events, "X") if e["cat"] in ("forward", "backward")}
    assert len(threads) == 2 * 3  # of each timeline on each rank


def test_times_are_microseconds_and_arguments_say_what_a_slice_is(events):
    slices = {(e["args"]["timeline"], e["name"]): e for e in of_phase(events, "X")}

    assert slices["predicted", "0B0"]["dur"] == pytest.approx(20_000)
    assert slices["predicted", "1F0"]["ts"] == pytest.approx(11_000)
    told = {"instruction": "1SEND_F3", "stage": 1, "timeline": "measured", "microbatch": 3}
    assert slices["measured", "1SEND_F3"]["args"] == told


def test_an_arrow_leads_from_a_slice_of_each_send_to_one_of_its_receive(events):
    starts, ends = ({e["id"]: e for e in of_phase(events, phase)} for phase in "sf")
    slices = defaultdict(list)
    for event in of_phase(events, "X"):
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))

    num_sends = sum("SEND" in e["name"] for e in of_phase(events, "X"))
    assert starts.keys() == ends.keys()
    assert len(starts) == num_sends == 2 * 20
    for key, start in starts.items():
        assert ends[key]["ts"] >= start["ts"]
        assert ends[key]["pid"] != start["pid"]
        for arrow in (start, ends[key]):
            assert any(begin <= arrow["ts"] <= end for begin, end in slices[arrow["pid"], arrow["tid"]])


def test_slices_of_one_thread_never_overlap_and_times_never_fall(events):
    ends = defaultdict(float)
    for event in of_phase(events, "X"):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= ends[thread] - 1e-6
        ends[thread] = event["ts"] + event["dur"]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def test_counters_rise_to_the_peak_and_end_at_zero(events):
    counters = [e for e in of_phase(events, "C") if e["name"] == "predicted activations" and e["pid"] == 0]

    values = [e["args"]["activations"] for e in counters]
    assert max(values) == PREDICTED.peak_activations[0]
    assert values[-1] == 0


def test_waits_for_data_are_slices_on_a_thread_of_their_own_from_the_start_of_the_step_on():
    waits = (
        DataWait(0, 0, -2.0, -1.0),
        DataWait(0, 1, -0.5, 0.002),
        DataWait(0, 2, 0.25, 0.5),
        DataWait(2, 1, 0.0, 1.0),
    )
    trace = json.loads(to_trace({"measured": replace(MEASURED, data_waits=waits)}))["traceEvents"]

    slices = [event for event in of_phase(trace, "X") if event["cat"] == "data"]
    names = threads_of(trace)
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in slices] == [
        (0, "data of microbatch 1", 0, 2_000),
        (2, "data of microbatch 1", 0, 1_000_000),
        (0, "data of microbatch 2", 250_000, 250_000),
    ]
    assert {names[e["pid"], e["tid"]] for e in slices} == {"measured data"}
    assert slices[0]["args"] == {"microbatch": 1, "timeline": "measured"}


@pytest.mark.feature("H7")
def test_host_and_device_stand_side_by_side_with_the_lane_and_the_waits():
    num_rows = MEASURED.program.num_instructions
    start_s = MEASURED.start_s - 0.002
    waits = np.where(np.arange(num_rows) == 3, 0.5, 0.0)
    host = HostTimes(start_s, start_s + 0.001, start_s + 0.001, start_s + 0.001 + waits)

    events = json.loads(to_trace({"measured": replace(MEASURED, host=host)}))["traceEvents"]

    threads = threads_of(events)
    on_host = [e for e in of_phase(events, "X") if threads[e["pid"], e["tid"]] == "measured host"]
    text, waited = str(MEASURED.program.instruction(0)), str(MEASURED.program.instruction(3))
    assert [e["name"] for e in on_host if e["cat"] == "host wait"] == [f"wait: {waited}"]
    assert len([e for e in on_host if e["cat"] == "host"]) == num_rows
    args = next(
        e["args"] for e in of_phase(events, "X") if e["name"] == waited and e["cat"] not in ("host", "host wait")
    )
    assert args["lane"] in ("compute", "send", "receive")
    assert args["host_ms"] == pytest.approx(1.0)
    assert args["host_wait_ms"] == pytest.approx(500.0)
    assert args["host_start_ms"] == pytest.approx(1e3 * start_s[3])
    assert text in {e["name"] for e in on_host}


def test_copies_are_slices_on_a_thread_of_their_own():
    program = lower(build("gpipe", ranks=2, microbatches=3), offload=[0])
    timeline = simulate(program, Costs.uniform(offload_s=0.25, reload_s=0.25))

    events = json.loads(to_trace({"predicted": timeline}))["traceEvents"]

    names = threads_of(events)
    threads = {e["name"]: names[e["pid"], e["tid"]] for e in of_phase(events, "X") if "LOAD" in e["name"]}
    assert len(threads) == 6
    assert {name.rstrip(" 2") for name in threads.values()} == {"predicted copies"}
    offload = next(e for e in of_phase(events, "X") if e["name"] == "0OFFLOAD1")
    assert (offload["cat"], offload["args"]["microbatch"], offload["dur"]) == ("offload", 1, 0.25e6)


def test_more_instructions_than_viewers_open_are_refused():
    number = PREDICTED.program.num_instructions

    with pytest.raises(ConfigError, match=f"format: {number} instructions are more than a trace viewer opens"):
        to_trace({"predicted": PREDICTED}, max_instructions=number - 1)
    assert to_trace({"predicted": PREDICTED}, max_instructions=number)
