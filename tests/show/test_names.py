"""Names beside points: none covers another."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.show.names import NAMED_RADIUS, NamePosition, place_names

ROOM = np.array([0.0, 0.0, 400.0, 300.0])
NO_LINES = np.empty((0, 4))


def placed(*centres, size=(60, 14), lines=NO_LINES):
    return place_names(np.array(centres, float), np.array([size] * len(centres), float), np.array(lines, float), ROOM)


def box_of(centre, size, place):
    """The box [left, bottom, right, top] of a name, worked out from where its nearest edge is."""
    ends = []
    for at, length, offset in zip(centre, size, (place.right, place.up), strict=True):
        low = at + offset - (length if offset < 0 else 0 if offset > 0 else length / 2)
        ends.append((low, low + length))
    (left, right), (bottom, top) = ends
    return left, bottom, right, top


def share_area(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize(
    ("centre", "options", "place"),
    [
        ((100, 100), {}, NamePosition(7, 0)),
        ((390, 100), {}, NamePosition(-7, 0)),
        ((200, 100), {"lines": [(205, 95, 300, 105), (100, 95, 195, 105)]}, NamePosition(0, 7)),
        ((50, 50), {"size": (500, 14)}, None),
    ],
    ids=[
        "alone to the right",
        "at the right edge to the left",
        "between two neighbours above",
        "left out without room",
    ],
)
def test_a_name_is_at_the_first_free_place_without_a_line(centre, options, place):
    assert placed(centre, **options) == [place]
    assert place is None or not place.has_line


def test_the_first_ones_choose_first():
    middle, right = (250, 100), (340, 100)

    assert placed(middle, right)[0] == NamePosition(7, 0)
    assert placed(right, middle)[0] == NamePosition(-7, 0)
    assert placed(middle, right)[1] != NamePosition(-7, 0)


def test_a_name_that_is_far_from_its_point_has_a_line_which_crosses_no_point():
    walls = [(104, 0, 118, 94), (104, 106, 118, 300), (0, 0, 96, 300), (96, 0, 104, 80), (96, 120, 104, 300)]

    (place,) = placed((100, 100), lines=walls)
    blocked = placed((100, 100), (112, 100), lines=walls)[0]

    assert place.has_line
    assert (place.right, place.up) == (24, 0)
    assert blocked != place


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), min_size=1, max_size=25, unique=True),
    st.integers(10, 120),
)
def test_names_cover_neither_names_nor_other_points_and_stay_inside(centres, width):
    size = (width, 14)

    places = placed(*centres, size=size)

    boxes = {centre: box_of(centre, size, place) for centre, place in zip(centres, places, strict=True) if place}
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= 400 and box[3] <= 300 for box in boxes.values())
    assert not any(share_area(one, other) for one, other in combinations(boxes.values(), 2))
    for own, box in boxes.items():
        others = [
            (x - NAMED_RADIUS, y - NAMED_RADIUS, x + NAMED_RADIUS, y + NAMED_RADIUS) for x, y in set(centres) - {own}
        ]
        assert not any(share_area(box, other) for other in others)
