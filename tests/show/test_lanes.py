"""How much detail a picture has, and what lanes draw."""

import numpy as np
import pytest

from penstock.show.bars import FOOT
from penstock.show.lanes import (
    MAX_DRAWN_BLOCKS,
    MAX_NUMBERED_BLOCKS,
    Detail,
    Lane,
    TimeScale,
    choose_detail,
    columns_for,
    draw_lanes,
)
from penstock.show.palette import COLLECTIVE_COLOUR, THEMES, block_colours, paler, to_hex
from penstock.show.sheet import Sheet
from tests.show.timelines import UNIT, paired_timeline, timeline_of, timeline_with_bars

LIGHT = THEMES["light"]


def lanes_of(timeline, paleness=0.0):
    return [
        Lane(timeline, range(rank, rank + 1), timeline.num_ranks - 1 - rank, 1.0, paleness)
        for rank in range(timeline.num_ranks)
    ]


def drawn(timeline, detail, paleness=0.0, width=10.0):
    """The axes after drawing."""
    sheet = Sheet.of(width, 3.0, LIGHT, "svg")
    axes = sheet.add_axes(0.5, 2.0)
    axes.set(xlim=(0, 1.2 * timeline.makespan_s), ylim=(0, timeline.num_ranks))
    draw_lanes(axes, lanes_of(timeline, paleness), TimeScale.of(timeline.makespan_s), sheet, detail)
    return axes


def colours_of(axes):
    return [to_hex(patch.get_facecolor()[:3]) for patch in axes.patches if not is_frame(patch)]


def is_frame(patch):
    return patch.get_facecolor()[3] == 0


def test_few_wide_blocks_are_numbered_many_or_narrow_ones_plain_and_very_many_or_those_of_several_ranks_merged():
    few, many, very_many = timeline_of(4, 16), timeline_of(16, 100), timeline_of(32, 200)
    assert MAX_NUMBERED_BLOCKS < many.program.is_compute.sum() < MAX_DRAWN_BLOCKS < very_many.program.is_compute.sum()
    long, short = timeline_of(2, 400), timeline_of(2, 2)
    cases = [(few, 26.0), (many, 26.0), (very_many, 26.0), (long, 200.0), (long, 26.0), (long, 8.0)]

    details = [choose_detail(lanes_of(one), one.makespan_s, width) for one, width in cases]

    assert details == [Detail.NUMBERED, Detail.PLAIN, Detail.MERGED] * 2
    assert choose_detail([Lane(short, range(2), 0, 1)], short.makespan_s, 8.0) is Detail.MERGED


def test_columns_can_be_seen():
    timeline = timeline_of(2, 400, costs=UNIT)

    edges_s = columns_for(lanes_of(timeline), timeline.makespan_s, 10.0)

    assert 10.0 * 120 / (len(edges_s) - 1) >= 4
    assert edges_s[1] % 3 == 0


def test_blocks_of_one_colour_are_one_path_and_stages_of_a_rank_have_colours_of_their_own():
    axes = drawn(timeline_of(1, 5), Detail.PLAIN)

    (forward, backward) = axes.patches
    assert len(forward.get_path().vertices) == len(backward.get_path().vertices) == 5 * 5
    ramps = list(block_colours(1).values())
    assert colours_of(axes) == [ramps[0][0], ramps[1][0]]
    axes = drawn(timeline_of(2, 4, "zbv"), Detail.PLAIN)
    assert len(set(colours_of(axes))) == 6


def test_a_pale_lane_has_paler_colours_and_bars():
    (forward, _) = colours_of(drawn(timeline_of(1, 2), Detail.PLAIN, paleness=0.45))
    bars = [colour for colour, *_ in strips_of(drawn(timeline_with_bars(), Detail.PLAIN, paleness=0.45))]

    (usual, *_) = next(iter(block_colours(1).values()))
    assert forward == paler(usual, LIGHT.background, 0.45)
    assert bars[1] == paler(COLLECTIVE_COLOUR, LIGHT.background, 0.45)


def test_an_overlapped_pair_is_framed():
    (frame,) = [patch for patch in drawn(paired_timeline(), Detail.NUMBERED).patches if is_frame(patch)]

    assert frame.get_path().vertices.tolist() == [[1, 0], [1, 1], [4, 1], [4, 0], [1, 0]]


def strips_of(axes):
    """(colour, left, right, low, high) of what is drawn as strips, lane after lane."""
    return [
        (to_hex(strip.get_facecolor()[0][:3]), *np.round([box.x0, box.x1, box.y0, box.y1], 6).tolist())
        for strip in axes.collections
        for box in (path.get_extents() for path in strip.get_paths())
    ]


@pytest.mark.parametrize("detail", Detail)
def test_collectives_and_optimizer_steps_are_thin_bars_at_their_place(detail):
    found = strips_of(drawn(timeline_with_bars(), detail))

    assert found == [
        (LIGHT.bubble, 0.0, 9.0, 1.0, 2.0),
        (COLLECTIVE_COLOUR, 9.0, 9.5, 1.0, 1.0 + FOOT),
        (LIGHT.ink, 9.5, 11.5, 1.0, 1.0 + FOOT),
        (LIGHT.bubble, 0.0, 9.0, 0.0, 1.0),
        (COLLECTIVE_COLOUR, 7.0, 9.5, 0.0, FOOT),
        (LIGHT.ink, 9.5, 11.5, 0.0, FOOT),
    ]


def test_numbers_stand_in_the_middle_of_their_blocks_where_they_have_room():
    texts = drawn(timeline_of(1, 2, costs=UNIT), Detail.NUMBERED).texts

    assert [(text.get_text(), *text.get_position()) for text in texts] == [
        ("0", 0.5, 0.5),
        ("0", 2.0, 0.5),
        ("1", 3.5, 0.5),
        ("1", 5.0, 0.5),
    ]
    timeline = timeline_of(1, 30, costs=UNIT)
    assert len(drawn(timeline, Detail.NUMBERED, width=10.0).texts) == 60
    assert len(drawn(timeline, Detail.NUMBERED, width=9.0).texts) == 30 + 10  # F only where one digit is enough


def test_merged_blocks_are_one_image_per_lane_that_ends_with_the_timeline():
    timeline = timeline_of(3, 8, costs=UNIT)

    axes = drawn(timeline, Detail.MERGED)

    assert [list(image.get_extent()[2:]) for image in axes.images] == [[2, 3], [1, 2], [0, 1]]
    ends = {round(axes.transData.inverted().transform(image.get_clip_box())[1][0], 6) for image in axes.images}
    assert ends == {timeline.makespan_s}


@pytest.mark.parametrize(("end_s", "unit", "end"), [(33.0, "s", 33.0), (0.0021, "ms", 2.1), (0.0, "s", 1.0)])
def test_time_has_its_natural_unit(end_s, unit, end):
    scale = TimeScale.of(end_s)

    assert (scale.name, round(scale.end, 9)) == (unit, end)
