"""Where blocks lie, exactly."""

import pytest

from penstock.ir.action import Kind
from penstock.show.layout import (
    block_numbers,
    blocks_of_rank,
    describe_shades,
    kinds_used,
    longest_number,
    num_blocks,
    num_shades,
    period_s,
    shade_of_stage,
    typical_block_s,
)
from tests.show.timelines import UNIT, paired_timeline, timeline_of


def rectangles(timeline, rank):
    """(text, start, end, low, high, shade) of every block of a rank."""
    blocks = blocks_of_rank(timeline, rank)
    texts = [str(timeline.program.instruction(row)) for row in blocks.row]
    columns = (blocks.start_s, blocks.end_s, blocks.low, blocks.high, blocks.shade)
    return list(zip(texts, *(column.tolist() for column in columns), strict=True))


def test_an_overlapped_pair_shares_its_lane_the_first_above():
    assert rectangles(paired_timeline(), 0) == [
        ("0F0", 0, 1, 0, 1, 0),
        ("0F1", 1, 4, 0.5, 1, 0),
        ("0B0", 1, 4, 0, 0.5, 0),
        ("0B1", 4, 6, 0, 1, 0),
    ]


def test_stages_of_a_rank_have_shades_in_their_order():
    timeline = timeline_of(2, 2, "interleaved-1f1b", UNIT, stages_per_rank=3)

    assert shade_of_stage(timeline.program).tolist() == [0, 0, 1, 1, 2, 2]
    assert num_shades(timeline.program) == 3
    assert {entry[0][0]: entry[5] for entry in rectangles(timeline, 1)} == {"1": 0, "3": 1, "5": 2}


@pytest.mark.parametrize(
    ("name", "ranks", "shades", "text"),
    [
        ("1f1b", 2, [0, 0], ""),
        ("zbv", 2, [0, 0, 1, 1], "from dark to pale: the 2 stages of a rank (0, 3 on rank 0)"),
        ("dualpipe", 4, [0] * 4 + [1] * 4, "dark: stages 0-3, first copy of the model; pale: stages 4-7, second copy"),
    ],
)
def test_shades_are_described_where_there_are_several(name, ranks, shades, text):
    program = timeline_of(ranks, 2 * ranks, name).program

    assert shade_of_stage(program).tolist() == shades
    assert describe_shades(program) == text


def test_blocks_are_numbered_with_their_microbatch_and_slice():
    whole, cut = timeline_of(2, 3), timeline_of(2, 11, "seq1f1b", slices=2)

    assert block_numbers(whole.program, blocks_of_rank(whole, 1)) == ["0", "0", "1", "1", "2", "2"]
    assert block_numbers(cut.program, blocks_of_rank(cut, 1))[:3] == ["0.0", "0.1", "0.1"]
    assert longest_number(whole.program) == len("2")
    assert longest_number(cut.program) == len("10.1")


def test_sizes_that_drawings_depend_on():
    timeline = timeline_of(2, 4, costs=UNIT)

    assert num_blocks([timeline, timeline]) == 32
    assert kinds_used([timeline]) == [Kind.FORWARD, Kind.BACKWARD]
    assert typical_block_s([timeline]) == 1.5
    assert period_s(timeline) == 3
