"""The table of blocks in a page holds the timeline, what each block waited for, and why ranks were idle."""

import gzip
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.show.bars import COLLECTIVE, OPTIMIZER_STEP
from penstock.show.block_table import (
    ALIGNMENT,
    LOWER,
    UPPER,
    block_table,
    idle_gaps,
    pack,
    tick_for,
    waits_of,
    whole_ticks,
)
from penstock.simulation import Costs
from penstock.simulation.causes import Cause, idle_times
from penstock.simulation.costs.fit import costs_from_timeline
from penstock.simulation.message_latency import Transfers, with_true_arrivals
from tests.show.timelines import UNIT, paired_timeline, timeline_of, timeline_with_bars


def times(table):
    """(begin, end) of every block in seconds, from gaps and durations."""
    found = []
    for lane in table.lanes:
        free = 0
        for block in range(lane.first, lane.first + lane.count):
            begin = free + int(table.columns["gap"][block])
            free = begin + int(table.columns["duration"][block])
            found.append((begin * table.tick_s, free * table.tick_s))
    return found


def texts(table):
    letters = "FBIW"
    columns = (table.columns[name].tolist() for name in ("stage", "kind", "microbatch"))
    return [f"{stage}{letters[kind]}{microbatch}" for stage, kind, microbatch in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("name", "shape"), [("1f1b", (4, 6)), ("zbv", (3, 7)), ("dualpipe", (4, 8)), ("interleaved-1f1b", (2, 4))]
)
def test_blocks_come_back_to_the_tick(name, shape):
    timeline = timeline_of(*shape, name, Costs.uniform(forward=0.0101, backward_input=0.0123, transfer=1 / 3000))

    table = block_table([timeline])

    rows = np.concatenate([timeline.compute_rows(rank) for rank in range(timeline.num_ranks)])
    assert texts(table) == [str(timeline.program.instruction(row)) for row in rows]
    expected = np.column_stack([timeline.start_s[rows], timeline.end_s[rows]])
    assert np.abs(np.array(times(table)) - expected).max() <= 0.51 * table.tick_s
    assert table.tick_s < 1e-8 * timeline.makespan_s


def test_producers_are_rows_of_the_table():
    table = block_table([timeline_of(2, 2, costs=Costs.uniform(transfer=0.25))])

    named = texts(table)
    producers = dict(zip(named, table.columns["producer"].tolist(), strict=True))
    assert producers == {
        "0F0": -1, "0F1": -1, "0B0": named.index("1B0"), "0B1": named.index("1B1"),
        "1F0": 0, "1B0": -1, "1F1": 1, "1B1": -1,
    }  # fmt: skip
    transfers = table.columns["transfer"] * table.tick_s
    assert transfers.tolist() == pytest.approx([0, 0, 0.25, 0.25, 0.25, 0, 0.25, 0])


def test_the_critical_path_is_marked():
    table = block_table([timeline_of(2, 2, costs=UNIT)])

    marked = [text for text, is_critical in zip(texts(table), table.columns["critical"], strict=True) if is_critical]
    assert marked == ["0F0", "0B1", "1F0", "1B0", "1F1", "1B1"]
    assert block_table([paired_timeline()]).columns["critical"].tolist() == [1, 1, 1, 1]


def test_halves_of_a_pair_are_marked_and_share_what_is_held():
    table = block_table([paired_timeline()])

    assert table.columns["half"].tolist() == [0, UPPER, LOWER, 0]
    assert table.columns["held"].tolist() == [1, 2, 2, 1]
    assert table.columns["kept"].tolist() == [1, 1, 1, 0]


def test_bytes_are_held_where_all_timelines_know_them():
    known, unknown = timeline_of(1, 2, costs=Costs.uniform(activation_bytes=(2**40,))), timeline_of(1, 2)

    assert block_table([known]).is_bytes
    assert block_table([known]).columns["held"].max() == 2**40
    assert not block_table([known, unknown]).is_bytes


def test_bars_come_back_to_the_tick_and_gaps_are_numbered_lane_after_lane_one_more_than_blocks():
    table = block_table([timeline_with_bars()])

    found = []
    for lane in table.lanes:
        free = 0
        for bar in range(lane.first_bar, lane.first_bar + lane.num_bars):
            begin = free + int(table.columns["bar_gap"][bar])
            free = begin + int(table.columns["bar_duration"][bar])
            name = table.bar_names[table.columns["bar_name"][bar]]
            found.append((lane.rank, *name, round(begin * table.tick_s, 6), round(free * table.tick_s, 6)))
    assert found == [
        (0, "0REDUCE_TIED0", COLLECTIVE, 9.0, 9.5), (0, "0STEP", OPTIMIZER_STEP, 9.5, 11.5),
        (1, "1REDUCE_TIED0", COLLECTIVE, 7.0, 9.5), (1, "1STEP", OPTIMIZER_STEP, 9.5, 11.5),
    ]  # fmt: skip
    assert table.columns["idle_gap"].tolist() == [2, 3, 5 + 0, 5 + 4]
    assert table.columns["idle_cause"].tolist() == [Cause.DEPENDENCY] * 3 + [Cause.SYNCHRONISATION]
    assert (table.columns["idle_ticks"] * table.tick_s).tolist() == pytest.approx([2, 1, 1, 2])


def test_timelines_of_different_numbers_of_ranks_are_refused():
    with pytest.raises(ConfigError, match="timelines: they have 2 and 4 ranks; show timelines of one number of ranks"):
        block_table([timeline_of(4, 4), timeline_of(2, 4)])


def test_lanes_of_a_rank_stand_together():
    table = block_table([timeline_of(2, 3), timeline_of(2, 4, "gpipe")])

    assert [(lane.rank, lane.timeline, lane.first, lane.count) for lane in table.lanes] == [
        (0, 0, 0, 6), (0, 1, 6, 8), (1, 0, 14, 6), (1, 1, 20, 8),
    ]  # fmt: skip


def entries(gaps):
    return list(zip(gaps.gap.tolist(), map(Cause, gaps.cause.tolist()), gaps.duration_s.tolist(), strict=True))


def summed(found):
    """[ranks, causes] seconds."""
    return np.array([np.bincount(one.cause, weights=one.duration_s, minlength=len(Cause)) for one in found])


def test_a_gap_is_named_by_the_number_of_blocks_before_it_and_may_have_several_causes():
    first, second = idle_gaps(timeline_with_bars(), UNIT)
    costs = Costs.uniform(transfer=0.25)
    with_transfers, _ = idle_gaps(timeline_of(2, 2, costs=costs), costs)
    (never_idle,) = idle_gaps(paired_timeline())

    assert entries(first) == [(2, Cause.DEPENDENCY, 2.0), (3, Cause.DEPENDENCY, 1.0)]
    assert entries(second) == [(0, Cause.DEPENDENCY, 1.0), (4, Cause.SYNCHRONISATION, 2.0)]
    assert entries(with_transfers)[:2] == [(2, Cause.DEPENDENCY, 2.25), (2, Cause.TRANSFER, 0.25)]
    assert entries(never_idle) == []


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_the_gaps_of_a_rank_add_up_to_what_the_doctor_tells(name, source):
    costs = Costs.uniform(forward=0.013, backward_input=0.011, backward_weight=0.007, transfer=0.002)
    timeline = replace(timeline_of(4, 8, name, costs=costs), source=source)
    true = with_true_arrivals(timeline) if source == "measured" else timeline

    expected = idle_times(true, costs_from_timeline(true)).by_rank

    assert summed(idle_gaps(timeline)) == pytest.approx(expected)
    assert expected.sum() > 0


def noticed_late(timeline):
    """A host that needs a tenth of each computation before it, and looks for messages after that."""
    transfers, rows = Transfers.of(timeline.program), timeline.program.is_compute
    start_s, end_s = timeline.start_s.copy(), timeline.end_s.copy()
    start_s[rows] += 0.1 * (end_s - start_s)[rows]
    end_s[transfers.receives] = start_s[transfers.consumers]
    return replace(timeline, source="measured", start_s=start_s, end_s=end_s)


def test_a_message_that_was_there_before_it_was_looked_for_is_not_waited_for():
    timeline = noticed_late(timeline_of(2, 8, costs=Costs.uniform(transfer=0.25)))
    true = with_true_arrivals(timeline)

    expected = idle_times(true, costs_from_timeline(true)).by_rank

    assert summed(idle_gaps(timeline)) == pytest.approx(expected)
    assert expected != pytest.approx(idle_times(timeline, costs_from_timeline(timeline)).by_rank)


def waits(timeline):
    """By the text of each computation: the text of what it waited for and when that was there; None for nothing."""
    producer, arrival_s = waits_of(timeline)
    program = timeline.program
    rows = [row for rank in range(timeline.num_ranks) for row in timeline.compute_rows(rank).tolist()]
    return {
        str(program.instruction(row)): None
        if producer[row] == NONE
        else (str(program.instruction(int(producer[row]))), float(arrival_s[row]))
        for row in rows
    }


def test_what_stays_on_its_rank_is_not_waited_for():
    found = waits(timeline_of(2, 2, "zbv", UNIT))

    assert found["1F0"] == ("0F0", 1.0)
    assert found["2F0"] is None  # the V turns on rank 1
    assert set(waits(paired_timeline()).values()) == {None}  # it has no messages
    assert all(wait is None for text, wait in found.items() if "W" in text)


def test_a_pair_waits_for_the_later_of_its_messages():
    timeline = timeline_of(4, 8, "dualpipe", UNIT)
    (producer, arrival_s), source = waits_of(timeline), predecessors(timeline.program)[:, 0]
    first = np.flatnonzero(timeline.program.joined)

    is_message = np.isin(timeline.program.op[source], (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD))
    own_s = np.where(is_message & (source != NONE), timeline.end_s[source], 0.0)
    arrivals_s = np.array([own_s[first], own_s[first + 1]])
    assert len({*np.argmax(arrivals_s, axis=0).tolist()}) == 2, "the later one is now the first, now the second"
    for half in (first, first + 1):
        assert arrival_s[half].tolist() == arrivals_s.max(axis=0).tolist()
    assert producer[first].tolist() == producer[first + 1].tolist()


def unpack(text, contents):
    """As the viewer does."""
    data = gzip.decompress(b64decode(text))
    return {
        entry["name"]: np.frombuffer(
            data, np.dtype(entry["type"]).newbyteorder("<"), count=entry["length"], offset=entry["offset"]
        )
        for entry in contents
    }


COLUMNS = {
    "kind": np.array([1, 2, 3], np.uint8),
    "gap": np.array([-5, 7], np.int32),
    "stage": np.array([2**32 - 1], np.uint32),
    "bytes": np.array([1e12, 0.5]),
    "nothing": np.zeros(0, np.int32),
}


def test_columns_come_back_from_where_a_browser_can_look_at_them_and_have_no_date():
    text, contents = pack(COLUMNS)

    assert {name: column.tolist() for name, column in unpack(text, contents).items()} == {
        name: column.tolist() for name, column in COLUMNS.items()
    }
    assert [entry["offset"] % ALIGNMENT for entry in contents] == [0] * len(COLUMNS)
    assert b64decode(text)[4:8] == bytes(4)
    assert (text, contents) == pack(COLUMNS)


@pytest.mark.parametrize("end_s", [33.0, 1e-6, 2.147483647, 2.15, 86_400.0])
def test_a_tick_is_a_power_of_ten_that_31_bits_can_count(end_s):
    tick_s = tick_for(end_s)

    assert np.log10(tick_s) == pytest.approx(round(np.log10(tick_s)))
    assert 2**31 / 10 - 1 <= end_s / tick_s < 2**31


def test_no_time_has_a_tick_and_times_are_rounded_to_ticks():
    assert tick_for(0.0) == 1.0
    assert whole_ticks(np.array([0.0, 0.3 - 0.1, 0.2]), 0.1).tolist() == [0, 2, 2]
