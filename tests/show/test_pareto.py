"""The front, and where everything of its picture lies."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.show.pareto import HOW_TO_READ, PLOT, Candidate, Caption, is_on_front, lay_out

CAPTION = Caption("a title", "activations")
FOUR = [
    Candidate("slow and small", 9.0, 2),
    Candidate("fast and large", 5.0, 8),
    Candidate("between", 6.0, 4),
    Candidate("beaten", 7.0, 4),
]


def marks_of(candidates, caption=CAPTION):
    return {mark.candidates[0].label: mark for mark in lay_out(candidates, caption).marks}


def test_the_front_is_what_none_beats():
    assert is_on_front(FOUR) == [True, True, True, False]


def test_equals_are_all_on_the_front():
    assert is_on_front([Candidate("a", 1.0, 1), Candidate("b", 1.0, 1), Candidate("c", 1.0, 2)]) == [True, True, False]


def test_what_does_not_fit_is_beaten_and_beats_nothing():
    assert is_on_front([Candidate("a", 1.0, 1, fits=False), Candidate("b", 2.0, 2)]) == [False, True]
    assert lay_out([Candidate("a", 1.0, 1, fits=False)], CAPTION).front == ()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=20))
def test_exactly_the_front_is_unbeaten(figures):
    candidates = [Candidate(str(number), step, memory) for number, (step, memory) in enumerate(figures)]

    unbeaten = [
        not any(
            other.step_s <= one.step_s
            and other.memory <= one.memory
            and (other.step_s, other.memory) != (one.step_s, one.memory)
            for other in candidates
        )
        for one in candidates
    ]
    assert is_on_front(candidates) == unbeaten


def test_faster_is_lower_and_smaller_is_further_left():
    marks = marks_of(FOUR)

    assert marks["fast and large"].y > marks["between"].y > marks["slow and small"].y
    assert marks["slow and small"].x < marks["between"].x == marks["beaten"].x < marks["fast and large"].x
    assert [marks[name].is_on_front for name in ("between", "beaten")] == [True, False]


def test_the_front_is_a_staircase_through_its_points():
    marks = marks_of(FOUR)
    small, middle, large = (marks[name] for name in ("slow and small", "between", "fast and large"))

    assert lay_out(FOUR, CAPTION).front == (
        (small.x, small.y), (middle.x, small.y), (middle.x, middle.y), (large.x, middle.y), (large.x, large.y),
    )  # fmt: skip


def test_equal_candidates_are_one_point_with_a_line_of_text_each():
    twins = [Candidate(f"twin {number}", 1.0, 1) for number in range(7)]

    (one,) = lay_out(twins[:2], CAPTION).marks
    (many,) = lay_out(twins, CAPTION).marks

    assert one.lines == ["twin 0", "twin 1"]
    assert many.lines == ["twin 0", "twin 1", "twin 2", "twin 3", "and 3 more"]


def test_labels_do_not_overlap():
    crowd = [Candidate(f"schedule {number}", 10 + number % 7, 20 + number % 5) for number in range(35)]

    boxes = [mark.label.box for mark in lay_out(crowd, CAPTION).marks if mark.label is not None]

    assert len(boxes) > 25
    assert not any(first.covers(second) for first, second in combinations(boxes, 2))
    assert all(PLOT.contains(box) for box in boxes)


def test_names_of_the_front_have_room_before_the_others():
    crowd = [
        Candidate(f"a schedule with a long name {number}", 10 + 0.01 * (number % 20), 10 + 0.02 * (number // 20))
        for number in range(60)
    ]
    slow, far = Candidate("a slow and small one", 10.1, 9.99), Candidate("far", 9.0, 20)

    picture = lay_out([*crowd, slow, far], CAPTION)

    assert picture.num_nameless > 0
    assert [mark.label is not None for mark in picture.marks if mark.is_on_front] == [True] * 3
    assert picture.notes(CAPTION) == [f"{HOW_TO_READ}; {picture.num_nameless} names left out"]


def test_what_is_over_the_limit_says_so():
    assert marks_of([Candidate("big", 1.0, 9, fits=False)])["big"].lines == ["big (over the limit)"]


@pytest.mark.parametrize(
    ("candidate", "caption", "names"),
    [
        (Candidate("a", 0.012, 3), CAPTION, ("activations", "step time (ms)")),
        (Candidate("a", 12.0, 3 * 2**30), Caption("", "peak", is_bytes=True), ("peak (GiB)", "step time (s)")),
    ],
)
def test_axes_have_their_natural_units(candidate, caption, names):
    picture = lay_out([candidate], caption)

    assert (picture.x_name, picture.y_name) == names


def test_ticks_are_round_and_lie_inside():
    picture = lay_out(FOUR, CAPTION)

    assert [tick.text for tick in picture.y_ticks] == ["5", "6", "7", "8", "9"]
    assert all(PLOT.left <= tick.at <= PLOT.right for tick in picture.x_ticks)
    assert all(PLOT.top <= tick.at <= PLOT.bottom for tick in picture.y_ticks)


def test_far_apart_values_are_shown_by_factors():
    picture = lay_out([Candidate("a", 1.0, 1), Candidate("b", 1.0, 10), Candidate("c", 1.0, 100)], CAPTION)

    low, middle, high = sorted(mark.x for mark in picture.marks)
    assert middle - low == pytest.approx(high - middle, abs=0.02)
    assert [tick.text for tick in picture.x_ticks] == ["1", "2", "5", "10", "20", "50", "100"]


def test_nothing_to_compare_is_refused():
    with pytest.raises(ConfigError, match="no schedule can be compared"):
        lay_out([], CAPTION)


def test_a_warning_stands_beside_how_to_read_it():
    assert lay_out(FOUR, CAPTION).notes(Caption("", warning="unequal work")) == [HOW_TO_READ, "unequal work"]
