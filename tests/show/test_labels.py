"""Names beside points: none covers another."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.show.labels import DISTANCES, Box, Name, line_end, place_names

PAGE = Box(0, 0, 400, 300)


def names_at(*places, width=60, height=14):
    return [Name(x, y, width, height) for x, y in places]


def point(name):
    return Box(name.x, name.y, name.x, name.y).grown(4)


def test_a_name_alone_stands_to_the_right_without_a_line():
    (placed,) = place_names(names_at((100, 100)), [], PAGE)

    assert placed.box == Box(108, 93, 168, 107)
    assert (placed.side, placed.anchor, placed.has_line) == ("left", 108, False)


def test_at_the_right_edge_it_stands_to_the_left():
    (placed,) = place_names(names_at((390, 100)), [], PAGE)

    assert placed.box == Box(322, 93, 382, 107)
    assert (placed.side, placed.anchor) == ("right", 382)


def test_between_two_neighbours_it_stands_above():
    names = names_at((200, 100))

    (placed,) = place_names(names, [Box(205, 95, 300, 105), Box(100, 95, 195, 105)], PAGE)

    assert placed.box.bottom == 100 - DISTANCES[0]
    assert (placed.side, placed.anchor) == ("center", 200)


def test_the_first_ones_choose_first():
    first, second = place_names(names_at((100, 100), (100, 100)), [], PAGE)

    assert first.box.left > 100
    assert second.box.right < 100


def test_a_name_near_another_point_gets_a_line():
    names = names_at((200, 100), (304, 100))
    walls = [Box(0, 0, 221, 300), Box(221, 0, 400, 92), Box(221, 108, 400, 300)]

    near, _ = place_names(names, [*map(point, names), *walls], PAGE)
    (alone,) = place_names(names[:1], walls, PAGE)

    assert near.box == alone.box == Box(224, 93, 284, 107)
    assert (near.has_line, alone.has_line) == (True, False)


def test_a_name_that_would_look_like_another_points_is_left_out():
    names = names_at((200, 100), (290, 100))
    walls = [Box(0, 0, 221, 300), Box(221, 0, 400, 92), Box(221, 108, 400, 300)]

    near, _ = place_names(names, [*map(point, names), *walls], PAGE)

    assert near is None


def test_a_name_without_room_is_left_out():
    assert place_names(names_at((50, 50), width=500), [], PAGE) == [None]


def test_lines_lead_to_the_nearest_place_of_a_name():
    name = Name(10, 10, 5, 5)

    assert line_end(name, Box(20, 0, 30, 20)) == (20, 10)
    assert line_end(name, Box(20, 15, 30, 25)) == (20, 15)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), min_size=1, max_size=25, unique=True),
    st.integers(10, 120),
)
def test_names_cover_neither_names_nor_points_and_stay_inside(places, width):
    names = names_at(*places, width=width)
    points = [point(name) for name in names]

    boxes = [placed.box for placed in place_names(names, points, PAGE) if placed is not None]

    assert all(PAGE.contains(box) for box in boxes)
    assert not any(first.covers(second) for first, second in combinations(boxes, 2))
    assert not any(box.covers(other) for box in boxes for other in points)
