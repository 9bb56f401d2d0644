"""What is compared: figures by hand, equal work where it is asked for, refusals in their place."""

import json
from fractions import Fraction

import pytest

from penstock.cli.comparison import (
    Comparison,
    Refusal,
    basis_of,
    compare,
    equal_work_s,
    names_on_front,
    notes,
    to_json,
    to_table,
)
from penstock.cli.wanted import Wanted
from penstock.errors import ConfigError, ScheduleError
from penstock.ir.schedule import Schedule
from penstock.proofs import Limit
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts
from penstock.tables import Screen

UNIT = Costs.uniform()


def wanted(name, ranks=2, microbatches=3, **options):
    return Wanted(name, True, lambda: build(name, ranks=ranks, microbatches=microbatches, **options))


def comparison(name="mine", num_parts=1, num_microbatches=3, peak=4):
    return Comparison(name, 10.0, 9.0, 0.25, 0.2, [peak, 1], 6, num_microbatches, Fraction(num_parts))


def activations(most):
    return Limit.read(f"{most} activations")


def refusing(error):
    def make():
        raise error

    return Wanted("mine", True, make)


def test_the_figures_of_1f1b_are_those_by_hand():
    found = compare(wanted("1f1b", ranks=4, microbatches=8), UNIT)

    assert (found.name, found.makespan_s, found.span_s) == ("1f1b", 33.0, 33.0)
    assert found.bubble_fraction == pytest.approx(9 / 33)
    assert found.bubble_rate == pytest.approx(9 / 33)
    assert (found.peak_activations, found.num_messages) == ([4, 3, 2, 1], 8 * 3 * 2)
    assert (found.num_parts, found.num_microbatches) == (1, 8)


def test_costs_are_those_of_a_rank_unless_they_are_per_action():
    shape = {"ranks": 4, "microbatches": 8, "stages_per_rank": 2}
    costs = Costs.uniform(forward=2, transfer=0.25)
    half = Costs.uniform(forward=1, backward_input=0.5, backward_weight=0.5, transfer=0.25)

    of_rank = compare(wanted("interleaved-1f1b", **shape), costs)
    of_action = compare(wanted("interleaved-1f1b", **shape), costs, per_action=True)

    assert of_action.makespan_s > 1.8 * of_rank.makespan_s
    assert of_rank == compare(wanted("interleaved-1f1b", **shape), half, per_action=True)


@pytest.mark.parametrize(
    ("name", "shape", "num_parts"),
    [
        ("1f1b", {}, 1),
        ("zbv", {}, 2),
        ("interleaved-1f1b", {"stages_per_rank": 3}, 3),
        ("interleaved-1f1b", {"stages": 3}, Fraction(3, 2)),
        ("seq1f1b", {"slices": 4}, 4),
        ("chimera", {"microbatches": 4}, 1),
    ],
)
def test_a_rank_runs_each_microbatch_once_per_stage_and_slice(name, shape, num_parts):
    assert compare(wanted(name, **shape), UNIT).num_parts == num_parts


@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b", "zbv", "chimera", "seq1f1b"])
def test_every_schedule_does_equal_work_by_default(name):
    slices = {"slices": 2} if name == "seq1f1b" else {}

    found = compare(wanted(name, ranks=2, microbatches=4, **slices), UNIT)

    assert found.makespan_s * (1 - found.bubble_fraction) == pytest.approx(4 * 3)


@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_the_bubble_of_interleaved_1f1b_is_the_published_share_of_that_of_1f1b(stages_per_rank):
    """Megatron-LM (arXiv 2104.04473, section 2.2): v stages per rank leave a v-th of the idle time, (p-1)(F+B)."""
    plain = compare(wanted("1f1b", ranks=4, microbatches=8), UNIT)
    loop = compare(wanted("interleaved-1f1b", ranks=4, microbatches=8, stages_per_rank=stages_per_rank), UNIT)

    assert plain.makespan_s - 24 == 3 * 3
    assert loop.makespan_s - 24 == pytest.approx(3 * 3 / stages_per_rank)


def test_zbv_has_no_bubble_beside_1f1b_and_as_much_memory_as_published():
    """Zero bubble (arXiv 2401.10241, section 6): ZB-V has no bubble where F = I = W, in the memory of 1F1B."""
    plain = compare(wanted("1f1b", ranks=4, microbatches=8), UNIT)
    v = compare(wanted("zbv", ranks=4, microbatches=8), UNIT)

    assert (plain.bubble_rate, v.bubble_rate) == (pytest.approx(9 / 33), pytest.approx(0))
    assert v.span_s / plain.span_s == pytest.approx(24 / 33)
    assert v.peak_microbatches == plain.peak_microbatches


@pytest.mark.parametrize("error", [ConfigError("takes 1 stage"), ScheduleError("mine: breaks 2 rules")])
def test_a_schedule_that_cannot_be_made_is_a_refusal_with_the_reason(error):
    assert compare(refusing(error), UNIT) == Refusal("mine", str(error))


def test_a_schedule_that_cannot_run_is_a_refusal():
    backward_first = Schedule.from_csv("0B0,0F0\n")

    found = compare(Wanted("mine", False, lambda: backward_first), UNIT)

    assert "0B0 runs before its forward" in found.reason


def test_an_error_of_another_kind_is_no_refusal():
    with pytest.raises(ZeroDivisionError):
        compare(refusing(ZeroDivisionError()), UNIT)


def test_json_has_these_keys_in_the_order_of_the_names():
    rows = [comparison("b"), Refusal("a", "takes 1 stage\nmore"), comparison("c", peak=2)]

    found = json.loads(to_json(rows, None))

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
        "is_on_front": False,
        "messages": 6,
    }
    assert found[2]["is_on_front"]
    assert found[1] == dict.fromkeys(found[0]) | {"name": "a", "error": "takes 1 stage\nmore"}
    assert [row["fits"] for row in json.loads(to_json(rows, activations(2)))] == [False, None, True]


def test_the_table_aligns_figures_and_lists_what_is_refused_below_it():
    rows = [
        comparison("longer", num_parts=2),
        Refusal("b", "broken:\n  first\n  second"),
        comparison("c", 2, peak=2),
    ]

    lines = to_table(rows, None, basis="Equal work.").splitlines()

    assert [line.split() for line in (lines[0], *lines[2:4])] == [
        [
            *("name", "makespan", "s", "span", "s", "bubble", "fraction", "bubble", "rate", "peak", "activations"),
            *("peak", "microbatches", "messages", "front"),
        ],
        ["longer", "10", "9", "0.2500", "0.2000", "4", "2", "6"],
        ["c", "10", "9", "0.2500", "0.2000", "2", "1", "6", "*"],
    ]
    assert lines[4:] == ["", "not compared:", "  b: broken: first", "", "Equal work."]


def test_a_narrow_screen_keeps_makespan_and_memory():
    found = to_table([comparison("interleaved-1f1b"), comparison("c")], None, screen=Screen(40)).splitlines()

    assert [line.split() for line in found[:2]] == [["makespan", "peak"], ["name", "s", "microbatches"]]
    assert max(map(len, found)) <= 40


def test_the_front_is_what_no_other_beats_in_step_time_and_memory():
    rows = [comparison("slow", peak=2), comparison("twin", peak=2), comparison("large", peak=4), Refusal("r", "no")]
    fast = Comparison("fast", 5.0, 5.0, 0.0, 0.0, [8], 0, 3, Fraction(1))

    assert names_on_front([*rows, fast], None) == {"slow", "twin", "fast"}
    assert names_on_front([*rows, fast], activations(4)) == {"slow", "twin"}


def test_steps_of_different_length_are_compared_for_equal_work():
    """Six microbatches take 20 s in two steps of three, and 18 s in one of six."""
    short, long = comparison("short"), Comparison("long", 18.0, 18.0, 0.0, 0.0, [4], 0, 6, Fraction(1))

    assert equal_work_s([short, long, Refusal("r", "no")]) == {"short": 20.0, "long": 18.0}
    assert names_on_front([short, long], None) == {"long"}
    table = to_table([short, long], None).splitlines()
    assert [line.split()[-2:] for line in table[2:4]] == [["6", "20"], ["18", "*"]]
    assert "s for 6  front" in table[0]


def test_within_each_of_several_limits_the_fastest_is_told():
    fast = Comparison("fast", 5.0, 5.0, 0.0, 0.0, [8], 0, 3, Fraction(1))
    rows = [comparison("slow"), fast, Refusal("r", "no")]

    table = to_table(rows, None, swept_limits=[activations(most) for most in (2, 4, 8)])
    objects = json.loads(to_json(rows, None, swept_limits=[activations(most) for most in (4, 8)]))

    assert table.splitlines()[4:] == [
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


def test_a_limit_adds_whether_each_fits():
    lines = to_table([comparison("a"), comparison("b", peak=2)], activations(2)).splitlines()

    assert [line.split()[-4:-1] for line in lines[:1]] == [["fits", "2", "activations"]]
    assert [line.split()[8:] for line in lines[2:4]] == [["no"], ["yes", "*"]]


def test_rounding_shows_no_negative_bubble():
    row = Comparison("mine", 1.0, 1.0, -1e-16, -1e-16, [1], 0, 1, Fraction(1))

    assert "-0.0000" not in to_table([row], None)


def test_unequal_work_is_told_where_costs_are_per_action():
    rows = [comparison("a"), comparison("b", 2), Refusal("r", "no"), comparison("c"), comparison("d", Fraction(3, 2))]

    ((heading, *lines),) = notes(rows, per_action=True)

    assert "unequal work" in heading
    assert lines == ["  1 in a, c", "  3/2 in d", "  2 in b"]
    assert notes(rows, per_action=False) == []


def test_a_note_tells_of_different_numbers_of_microbatches():
    (told,) = notes([comparison("a"), comparison("b", num_microbatches=4)], per_action=False)

    assert told == ["note: the rows run different numbers of microbatches:", "  3 in a", "  4 in b"]


def test_names_that_tell_their_numbers_need_no_note():
    rows = [comparison("a, 3 microbatches"), comparison("a, 4 microbatches", num_microbatches=4)]

    assert notes(rows, per_action=False) == []


def test_equal_rows_need_no_note():
    assert notes([comparison("a", 2), comparison("b", 2), Refusal("r", "no")], per_action=True) == []


def test_a_line_says_what_is_equal():
    assert basis_of(UNIT, "F=1", per_action=False).startswith("Equal work: F=1 is all that a rank does")
    assert basis_of(UNIT, "F=1", per_action=True).startswith("Costs per action: F=1")
    assert basis_of(LayerCosts(forward=1.0), "f.toml", per_action=False).startswith("Equal work: f.toml is per layer")
