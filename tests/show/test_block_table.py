"""The table behind the page holds the timeline."""

import numpy as np
import pytest

from penstock.show.block_table import LOWER, UPPER, block_table
from penstock.simulate import Costs
from tests.show.timelines import UNIT, paired_timeline, timeline_of


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


def test_lanes_of_a_rank_stand_together():
    table = block_table([timeline_of(2, 3), timeline_of(2, 4, "gpipe")])

    assert [(lane.rank, lane.timeline, lane.first, lane.count) for lane in table.lanes] == [
        (0, 0, 0, 6), (0, 1, 6, 8), (1, 0, 14, 6), (1, 1, 20, 8),
    ]  # fmt: skip
