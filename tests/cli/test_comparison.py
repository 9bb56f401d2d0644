"""A comparison is written as a table, JSON, a picture."""

import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest

from penstock.cli.comparison import (
    MEMORY_NAME,
    ComparedSchedules,
    basis,
    grouped_refusals,
    notes,
    to_json,
    to_picture,
    to_table,
)
from penstock.errors import ConfigError
from penstock.proofs import Limit
from penstock.searching.comparison import Comparison, Refusal
from penstock.searching.fitting import FittingSplit

FAST = Comparison("fast", 5.0, 5.0, 0.0, 0.0, [8], 0, 3, Fraction(1))


def comparison(name="mine", num_parts=1, num_microbatches=3, peak=4):
    return Comparison(name, 10.0, 9.0, 0.25, 0.2, [peak, 1], 6, num_microbatches, Fraction(num_parts))


def point(name, makespan_s, peak, num_microbatches=8, num_parts=1):
    row = comparison(name, num_parts, num_microbatches)
    return replace(row, makespan_s=makespan_s, span_s=makespan_s, peak_activations=[peak])


def activations(most):
    return Limit.read(f"{most} activations")


def compared(*rows, **others):
    return ComparedSchedules(rows=rows, **{"costs": "F=1,I=1,W=1", **others})


POINTS = [point("fast", 5.0, 8), Refusal("odd", "needs an even number"), point("small", 6.0, 4)]


def drawn(*rows, format="html", shape=None, theme=None, **others):
    shape = {"rank": 4, "microbatch": 8} if shape is None else shape
    return to_picture(compared(*rows, **others), shape, format=format, theme=theme)


def texts_of(picture):
    return re.findall(r"<text[^>]*>(.*?)</text>", picture.decode())


def test_json_has_these_keys_in_the_order_of_the_names():
    rows = [comparison("b"), Refusal("a", "takes 1 stage\nmore"), comparison("c", peak=2)]

    found = json.loads(to_json(compared(*rows)))

    assert [row["name"] for row in found] == ["b", "a", "c"]
    assert found[0] == {
        "name": "b",
        "makespan_s": 10.0,
        "span_s": 9.0,
        "bubble_fraction": 0.25,
        "bubble_rate": 0.2,
        "peak_activations": [4, 1],
        "peak_bytes": None,
        "num_microbatches": 3,
        "split": None,
        "copies": 1,
        "is_on_front": False,
        "messages": 6,
    }
    assert found[2]["is_on_front"]
    assert found[1] == dict.fromkeys(found[0]) | {"name": "a", "error": "takes 1 stage\nmore"}
    assert [row["fits"] for row in json.loads(to_json(compared(*rows, limit=activations(2))))] == [False, None, True]


def test_the_table_aligns_figures_and_lists_what_is_refused_below_it():
    rows = [
        comparison("longer", num_parts=2),
        Refusal("b", "broken:\n  first\n  second"),
        comparison("c", 2, peak=2),
    ]

    lines = to_table(compared(*rows, costs="c.toml", per_layer=True)).splitlines()

    assert [line.split() for line in (lines[0], *lines[2:4])] == [
        [
            *("name", "makespan", "s", "span", "s", "bubble", "fraction", "bubble", "rate", "peak", "activations"),
            *("peak", "microbatches", "messages", "front"),
        ],
        ["c", "10", "9", "0.2500", "0.2000", "2", "1", "6", "*"],
        ["longer", "10", "9", "0.2500", "0.2000", "4", "2", "6"],
    ]
    below = ["", "not compared:", "  b: broken: first", "", basis(compared(costs="c.toml", per_layer=True))]
    assert lines[4:] == [*below, "", "best that fits: c, 10 s, 6 messages"]
    assert "-0.0000" not in to_table(compared(replace(A, bubble_fraction=-1e-16, bubble_rate=-1e-16)))
    for options, told in (
        ({"costs": "F=1"}, "Equal work: F=1 is all that a rank does"),
        ({"costs": "F=1", "per_action": True}, "Costs per action: F=1"),
        ({"costs": "f.toml", "per_layer": True}, "Equal work: f.toml is per layer"),
    ):
        assert basis(compared(**options)).startswith(told)


def test_within_each_of_several_limits_the_fastest_is_told():
    rows = [comparison("slow"), FAST, Refusal("r", "no")]

    table = to_table(compared(*rows, swept_limits=[activations(most) for most in (2, 4, 8)]))
    objects = json.loads(to_json(compared(*rows, swept_limits=[activations(most) for most in (4, 8)])))

    assert table.splitlines()[4:-2] == [
        "",
        "not compared:",
        "  r: no",
        "",
        "fastest within 2 activations: none fits",
        "fastest within 4 activations: slow",
        "fastest within 8 activations: fast",
    ]
    assert [row.get("fits") for row in objects] == [
        {"4 activations": True, "8 activations": True},
        {"4 activations": False, "8 activations": True},
        None,
    ]


TWICE = Comparison("twice", 4.0, 4.0, 0.0, 0.0, [1], 2, 3, Fraction(1), num_copies=2)


def names_of(table):
    return [line.split()[0] if line else "" for line in table.split("\n\nEqual work")[0].splitlines()[2:]]


def test_rows_stand_by_step_time_and_those_with_two_copies_of_the_weights_apart():
    rows = [TWICE, comparison("slow"), FAST, comparison("thin", peak=2)]

    table = to_table(compared(*rows))

    assert names_of(table) == ["fast", "thin", "slow", "", "twice"]
    assert table.splitlines()[0].split()[1] == "copies"
    assert [line.split()[1] for line in table.splitlines()[2:5]] == ["1"] * 3
    assert table.splitlines()[6].split()[1] == "2"
    assert "copies" not in to_table(compared(FAST))
    assert [row["copies"] for row in json.loads(to_json(compared(*rows)))] == [2, 1, 1, 1]


def test_the_last_line_names_the_best_that_fits():
    rows = [comparison("slow"), FAST, Refusal("r", "no"), TWICE]

    def last(*rows, count=1, **others):
        return to_table(compared(*rows, **others)).splitlines()[-count:]

    assert last(*rows[:3]) == ["best that fits: fast, 5 s, 0 messages"]
    assert last(*rows, count=2) == [
        "best with two copies of the weights: twice, 4 s, 2 messages",
        "best that fits: fast, 5 s, 0 messages",
    ]
    assert last(*rows[:3], limit=activations(4)) == ["best that fits: slow, 10 s, 6 messages"]
    assert last(*rows[:3], limit=activations(1)) == ["best that fits: none of 2 within 1 activations"]
    assert last(*rows, limit=activations(1)) == [
        "best that fits: twice, 4 s, 2 messages, with two copies of the weights"
    ]
    assert last(FAST) == [basis(compared())]  # one alone is no best
    unequal = compared(comparison("a"), comparison("b", 2), per_action=True)
    assert "best" not in to_table(unequal)
    swept = to_table(compared(*rows, swept_sizes={"ranks": (2, 4)}))
    assert "best" not in swept
    assert names_of(swept)[:2] == ["slow", "fast"]


def test_where_no_split_fits_the_least_is_named_with_its_split():
    def row(name, least_bytes, *, is_exact):
        splits = FittingSplit(None, (2, 4), least_bytes, is_exact)
        return replace(comparison(name), peak_bytes=[2**31, 2**31], split=(3, 3), other_splits=splits)

    def last(*rows):
        return to_table(compared(*rows, limit=Limit.read("1GiB"), per_layer=True)).splitlines()[-1]

    exact, other = row("a", 2**31, is_exact=True), row("b", 3 * 2**29, is_exact=False)
    assert last(exact) == "best that fits: none of 1 within 1GiB, whatever the split; least, 2.00 GiB: a, split 2,4"
    told = "best that fits: none of 2 within 1GiB; least, 1.50 GiB: b, split 2,4. Not every split was tried of b"
    assert last(exact, other) == told


def test_equal_reasons_are_told_once_with_the_names():
    refused = [
        Refusal("a", "slices: a does not cut, got 2; use 1 slice, or such as c"),
        Refusal("b", "slices: b does not cut, got 2; use 1 slice, or such as d"),
        Refusal("other", "broken:\n  first\n  second"),
        Refusal("a:key=value,more=1", "slices: a does not cut, got 2; use 1 slice"),
    ]

    assert grouped_refusals(refused[:3]) == [
        ("a, b", "slices: does not cut, got 2; for a: use 1 slice, or such as c"),
        ("other", "broken: first"),
    ]
    assert grouped_refusals(refused[::3]) == [
        ("a; a:key=value,more=1", "slices: does not cut, got 2; for a: use 1 slice, or such as c")
    ]
    twins = [Refusal(name, "7 layers for 8 stages; use 7 (in a file)") for name in ("a", "b")]
    assert grouped_refusals(twins) == [("a, b", "7 layers for 8 stages; use 7 (in a file)")]
    assert grouped_refusals(refused[:1]) == [("a", "slices: a does not cut, got 2; use 1 slice, or such as c")]


A, B = comparison("a"), comparison("b", 2)
UNEQUAL = [A, B, Refusal("r", "no"), comparison("c"), comparison("d", Fraction(3, 2))]
WORK = "note: the rows do unequal work; actions of each kind that a rank runs for one microbatch:"
COUNTS = "note: the rows run different numbers of microbatches:"
SIZES = "warning: activations are of unequal size; a microbatch leaves so many on a rank:"
FIX = "  Give the limit in microbatches, such as '8 microbatches'."


@pytest.mark.parametrize(
    ("rows", "others", "told"),
    [
        (UNEQUAL, {"per_action": True}, [[WORK, "  1 in a, c", "  3/2 in d", "  2 in b"]]),
        (UNEQUAL, {}, []),
        ([comparison("a", 2), comparison("b", 2), Refusal("r", "no")], {"per_action": True}, []),
        ([A, comparison("b", num_microbatches=4)], {}, [[COUNTS, "  3 in a", "  4 in b"]]),
        ([comparison("a, 3 microbatches"), comparison("a, 4 microbatches", num_microbatches=4)], {}, []),
        ([A, B], {"limit": activations(8)}, [[SIZES, "  1 in a", "  2 in b", FIX]]),
        ([A, B], {"swept_limits": [activations(8)]}, [[SIZES, "  1 in a", "  2 in b", FIX]]),
        ([A, B], {"limit": Limit.read("8 microbatches")}, []),
        ([A, comparison("c")], {"limit": activations(8)}, []),
    ],
)
def test_notes_say_in_what_the_rows_differ_that_should_be_equal(rows, others, told):
    assert notes(compared(*rows, **others)) == told


def test_steps_of_different_length_get_a_column_of_seconds_for_equal_work():
    short, long = comparison("short"), Comparison("long", 18.0, 18.0, 0.0, 0.0, [4], 0, 6, Fraction(1))

    table = to_table(compared(short, long)).splitlines()

    assert [line.split()[-2:] for line in table[2:4]] == [["18", "*"], ["6", "20"]]
    assert "s for 6  front" in table[0]


def test_pictures_name_what_was_compared_and_its_memory():
    result = drawn(*POINTS, point("halves", 5.5, 8, num_parts=2), limit=activations(4))

    assert {"fast (over the limit)", "small", MEMORY_NAME} <= set(texts_of(result))
    assert b"Step time and memory, 4 ranks, 8 microbatches, with F=1,I=1,W=1" in result
    assert b"odd" not in result
    with pytest.raises(ConfigError, match="no schedule can be compared"):
        drawn(POINTS[1], format="svg")
    assert re.search(r"halves.*\n.*\n[^\n]*: 4</title>", result.decode()), "activations count as whole microbatches"


@pytest.mark.parametrize("names", ["ab", ["a, 8 microbatches", "b, 16 microbatches"]])
def test_different_numbers_of_microbatches_stand_beside_the_names_and_times_are_for_equal_work(names):
    first, second = names

    page = drawn(point(first, 1.0, 2), point(second, 3.0, 1, num_microbatches=16))

    assert {"a, 8 microbatches", "b, 16 microbatches"} <= set(texts_of(page))
    assert b"times are for 16 microbatches" in page


def test_a_sweep_of_one_size_is_drawn_over_it():
    rows = [point("a, 8 microbatches", 1.0, 4), point("a, 16 microbatches", 1.5, 4, num_microbatches=16)]
    sizes = {"microbatches": (8, 16)}

    picture = drawn(*rows, format="svg", shape={"rank": 4, "microbatch": None}, swept_sizes=sizes)

    assert {"a", "microbatches", "step time (s)"} <= set(texts_of(picture))
    assert not any("a, 8" in text for text in texts_of(picture))


def test_a_picture_warns_of_unequal_work_where_costs_are_per_action():
    rows = [point("a", 1.0, 2), point("b", 2.0, 1, num_parts=2)]

    assert b"ranks do unequal work" not in drawn(*rows)
    unequal = drawn(*rows, per_action=True)
    assert b"ranks do unequal work" in unequal
    assert b"F=1,I=1,W=1 per action" in unequal
