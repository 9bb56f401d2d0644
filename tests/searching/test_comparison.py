"""Predictions of schedules side by side: figures by hand, equal work, the front, refusals."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.schedule import Schedule
from penstock.lowering import Sharding
from penstock.proofs import Limit
from penstock.schedules import build
from penstock.searching.comparison import (
    Comparison,
    Refusal,
    are_on_front,
    by_step_time,
    compare,
    equal_work_s,
    fastest_within,
)
from penstock.simulation import Costs, LayerCosts

UNIT = Costs.uniform()
FAST = Comparison("fast", 5.0, 5.0, 0.0, 0.0, [8], 0, 3, Fraction(1))


def made(name, ranks=2, microbatches=3, **options):
    return partial(build, name, ranks=ranks, microbatches=microbatches, **options)


def comparison(name="mine", num_parts=1, num_microbatches=3, peak=4):
    return Comparison(name, 10.0, 9.0, 0.25, 0.2, [peak, 1], 6, num_microbatches, Fraction(num_parts))


def test_replicas_count_with_what_they_exchange_and_hold():
    costs = Costs.uniform(parameter_bytes=(80,), gradient_bytes=(40,), optimizer_bytes=(8,), activation_bytes=(1,),
                          replica_bandwidth_bytes_per_s=10.0)  # fmt: skip
    make = made("1f1b", ranks=1)

    plain = compare("1f1b", make, costs)
    none = compare("1f1b", make, costs, replicas=2)
    full = compare("1f1b", make, costs, replicas=2, sharding=Sharding("full"))

    assert (plain.time_s, plain.step_s, plain.memory, plain.exchanges_are_free) == (9.0, None, 1, True)
    assert (none.time_s, none.makespan_s) == (9 + 2 * 2, 9.0)  # 20 of 40 bytes go there, and as many back
    assert (full.time_s, full.makespan_s) == (4 + 9 + 2, 9.0)  # 40 of 80 bytes, then 20 of 40
    assert (none.memory, full.memory) == (128 + 1, 64 + 80 + 40 + 1)
    assert (full.num_gathers, full.peak_whole, full.exchanges_are_free) == (1, [1], False)
    assert are_on_front([none, full], None) == [True, False]
    assert equal_work_s([none, full]) == [13.0, 15.0]


def activations(most):
    return Limit.read(f"{most} activations")


def refusing(error):
    def make():
        raise error

    return make


def test_the_figures_of_1f1b_are_those_by_hand():
    found = compare("1f1b", made("1f1b", ranks=4, microbatches=8), UNIT)

    assert (found.name, found.makespan_s, found.span_s) == ("1f1b", 33.0, 33.0)
    assert found.bubble_fraction == pytest.approx(9 / 33)
    assert found.bubble_rate == pytest.approx(9 / 33)
    assert (found.peak_activations, found.num_messages) == ([4, 3, 2, 1], 8 * 3 * 2)
    assert (found.num_parts, found.num_microbatches) == (1, 8)


def test_costs_are_those_of_a_rank_unless_they_are_per_action():
    shape = {"ranks": 4, "microbatches": 8, "stages_per_rank": 2}
    costs = Costs.uniform(forward=2, transfer=0.25)
    half = Costs.uniform(forward=1, backward_input=0.5, backward_weight=0.5, transfer=0.25)

    of_rank = compare("interleaved-1f1b", made("interleaved-1f1b", **shape), costs)
    of_action = compare("interleaved-1f1b", made("interleaved-1f1b", **shape), costs, per_action=True)

    assert of_action.makespan_s > 1.8 * of_rank.makespan_s
    assert of_rank == compare("interleaved-1f1b", made("interleaved-1f1b", **shape), half, per_action=True)


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
    assert compare(name, made(name, **shape), UNIT).num_parts == num_parts


@pytest.mark.parametrize("error", [ConfigError("takes 1 stage"), ScheduleError("mine: breaks 2 rules")])
def test_a_schedule_that_cannot_be_made_is_a_refusal_with_the_reason(error):
    assert compare("mine", refusing(error), UNIT) == Refusal("mine", str(error))


def test_a_schedule_that_cannot_run_is_a_refusal():
    backward_first = Schedule.from_csv("0B0,0F0\n")

    found = compare("mine", lambda: backward_first, UNIT)

    assert "0B0 runs before its forward" in found.reason


def test_an_error_of_another_kind_is_no_refusal():
    with pytest.raises(ZeroDivisionError):
        compare("mine", refusing(ZeroDivisionError()), UNIT)


def test_the_front_is_what_no_other_beats_in_step_time_memory_and_copies_of_the_weights():
    rows = [comparison("slow", peak=2), comparison("twin", peak=2), comparison("large", peak=4), FAST]

    assert are_on_front(rows, None) == [True, True, False, True]
    assert are_on_front(rows, activations(4)) == [True, True, False, False]
    assert are_on_front(rows, activations(1)) == [False] * 4
    assert are_on_front([], None) == []
    single, twice = comparison("single"), replace(FAST, name="twice", peak_activations=[2], num_copies=2)
    assert are_on_front([single, twice], None) == [True, True]
    assert are_on_front([FAST, replace(twice, makespan_s=6.0)], None) == [True, True]
    assert are_on_front([FAST, replace(twice, makespan_s=6.0, peak_activations=[8])], None) == [True, False]


def test_rows_are_ordered_by_copies_then_time_then_memory_then_messages():
    twice = replace(FAST, name="twice", makespan_s=1.0, num_copies=2)
    few = replace(comparison("few"), num_messages=2)
    rounded = replace(comparison("small", peak=3), makespan_s=10.0 + 1e-12)

    assert by_step_time([twice, comparison("slow"), few, rounded, FAST]) == [4, 3, 2, 1, 0]


def test_a_bidirectional_placement_has_two_copies_of_the_weights():
    assert compare("chimera", made("chimera", microbatches=4), UNIT).num_copies == 2
    assert compare("zbv", made("zbv", microbatches=4), UNIT).num_copies == 1


def test_steps_of_different_length_are_compared_for_equal_work():
    """Six microbatches take 20 s in two steps of three, and 18 s in one of six."""
    short, long = comparison("short"), Comparison("long", 18.0, 18.0, 0.0, 0.0, [4], 0, 6, Fraction(1))

    assert equal_work_s([short, long]) == [20.0, 18.0]
    assert are_on_front([short, long], None) == [False, True]
    assert fastest_within([short, long], activations(4)) is long


def test_the_fastest_within_a_limit_is_of_those_that_fit():
    rows = [comparison("slow"), FAST]

    assert [fastest_within(rows, activations(most)) for most in (2, 4, 8)] == [None, rows[0], FAST]


def test_a_limit_in_microbatches_is_that_of_the_peak_in_microbatches():
    """Of 4 activations of half a rank, two microbatches are left."""
    row = comparison(num_parts=2)

    assert row.peak_microbatches == 2
    assert row.fits(Limit.read("2 microbatches"))
    assert not row.fits(Limit.read("1.9 microbatches"))
    assert not comparison(num_parts=1).fits(Limit.read("3 microbatches"))


def test_bytes_that_are_not_known_fit_no_limit_of_bytes():
    assert not comparison().fits(Limit.read("1GiB"))
    assert fastest_within([comparison()], Limit.read("1GiB")) is None


LAYERS = LayerCosts(forward=[1.0] * 6, backward=[2.0] * 6, activation_bytes=[10, 10, 1, 1, 1, 1], split=[3, 3])
"""Rank 0 of 1F1B holds two microbatches of its layers, rank 1 one."""


@pytest.mark.parametrize(
    ("limit", "keeps_split", "split", "fits"),
    [
        (42, False, (3, 3), True),  # 2 x 21
        (41, False, (2, 4), True),  # 2 x 20
        (39, False, (1, 5), True),  # 2 x 10
        (19, False, (3, 3), False),
        (41, True, (3, 3), False),
        (41, None, (3, 3), False),
    ],
)
def test_costs_per_layer_are_split_so_that_they_fit(limit, keeps_split, split, fits):
    limits = Limit.read(f"{limit} activations") if keeps_split is None else Limit.read(limit)

    found = compare("1f1b", made("1f1b"), LAYERS, limit=limits, keeps_split=bool(keeps_split))

    assert found.split == split
    assert found.fits(limits) == fits or keeps_split is None
    assert (found.other_splits is None) == (limit == 42 or keeps_split is not False)
    if limit == 19:
        others = found.other_splits
        assert (others.split, others.least_bytes, others.least) == (None, 20, (1, 5))


def test_a_split_of_other_stages_is_not_kept():
    costs = replace(LAYERS, split=(1, 2, 3))

    found = compare("1f1b", made("1f1b"), costs, limit=Limit.read(39), keeps_split=True)

    assert found.split == (1, 5)
