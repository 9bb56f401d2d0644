"""The table of blocks in a page holds the timeline."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.show.bars import COLLECTIVE, OPTIMIZER_STEP
from penstock.show.block_table import LOWER, UPPER, block_table
from penstock.simulation import Costs
from penstock.simulation.causes import Cause
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


def test_bars_come_back_to_the_tick_and_know_what_they_are():
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


def test_gaps_are_numbered_lane_after_lane_one_more_than_blocks():
    table = block_table([timeline_with_bars()], [UNIT])

    assert table.columns["idle_gap"].tolist() == [2, 3, 5 + 0, 5 + 4]
    assert table.columns["idle_cause"].tolist() == [Cause.DEPENDENCY] * 3 + [Cause.SYNCHRONISATION]
    assert (table.columns["idle_ticks"] * table.tick_s).tolist() == pytest.approx([2, 1, 1, 2])


def test_the_costs_of_a_prediction_say_what_is_usual():
    """Only what lies above the mean stage is imbalance."""
    costs = replace(UNIT, forward_s=(1.0, 3.0))
    timeline = timeline_of(2, 1, costs=costs)

    def causes(*of_it):
        return set(block_table([timeline], *of_it).columns["idle_cause"].tolist())

    assert Cause.IMBALANCE in causes([costs])
    assert Cause.IMBALANCE not in causes([Costs.uniform(forward=3.0)])


def test_timelines_of_different_numbers_of_ranks_are_refused():
    with pytest.raises(ConfigError, match="timelines: they have 2 and 4 ranks; show timelines of one number of ranks"):
        block_table([timeline_of(4, 4), timeline_of(2, 4)])


def test_lanes_of_a_rank_stand_together():
    table = block_table([timeline_of(2, 3), timeline_of(2, 4, "gpipe")])

    assert [(lane.rank, lane.timeline, lane.first, lane.count) for lane in table.lanes] == [
        (0, 0, 0, 6), (0, 1, 6, 8), (1, 0, 14, 6), (1, 1, 20, 8),
    ]  # fmt: skip
