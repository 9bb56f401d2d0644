"""Makespans for a search: those of `simulate`, for every order of one shape."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.makespans import Makespans
from tests.actions import parse_action
from tests.simulation.events import uneven_costs
from tests.strategies import feasible_schedules, schedules

COSTS = Costs.uniform(transfer=0.1)


def drawn(*lines, num_microbatches=1):
    orders = [[parse_action(text) for text in line.split()] for line in lines]
    return Schedule.from_actions("drawn", Placement.line(len(lines)), orders, num_microbatches=num_microbatches)


@pytest.mark.slow
@given(feasible_schedules() | schedules(max_ranks=6, max_microbatches=12), st.integers(0, 2**32), st.booleans())
def test_the_makespan_is_that_of_the_simulated_schedule(schedule, seed, is_serialized):
    costs = uneven_costs(lower(schedule), seed)
    costs = replace(costs, split_forward_s=costs.backward_s if seed % 2 else ())
    if not is_serialized:
        costs = replace(costs, is_exclusive=False, channels=())

    found = Makespans(schedule, costs).of(schedule)

    assert found == simulate(schedule, costs).makespan_s


def test_one_preparation_serves_all_orders_of_a_shape_and_whole_and_split_backwards():
    whole, split = (build(name, ranks=4, microbatches=8) for name in ("1f1b", "zb-h1"))
    for costs in (COSTS, replace(COSTS, split_forward_s=(1.5,))):
        makespans = Makespans(whole, costs)

        for schedule in (whole, split, build("gpipe", ranks=4, microbatches=8)):
            assert makespans.of(schedule) == simulate(schedule, costs).makespan_s


@pytest.mark.parametrize(
    "lines", [("0B0 0F0", "1F0 1B0"), ("0F0 0B0", "1B0 1F0"), ("0F0 0W0 0I0", "1F0 1B0")], ids=["B", "last B", "W"]
)
def test_an_order_that_cannot_run_takes_for_ever(lines):
    for costs in (COSTS, replace(COSTS, is_exclusive=True)):
        assert Makespans(drawn("0F0 0B0", "1F0 1B0"), costs).of(drawn(*lines)) == inf


def test_a_schedule_of_another_shape_is_refused():
    makespans = Makespans(build("1f1b", ranks=4, microbatches=8), COSTS)

    for other in ({"ranks": 4, "microbatches": 9}, {"ranks": 2, "microbatches": 8}):
        with pytest.raises(ScheduleError, match=r"^1f1b: its placement, microbatches or slices differ"):
            makespans.of(build("1f1b", **other))


def test_a_kind_that_the_costs_do_not_know_is_refused():
    whole = drawn("0F0 0B0")
    makespans = Makespans(whole, Costs(forward_s=(1.0,), backward_s=(2.0,)))

    assert makespans.of(whole) == 3
    with pytest.raises(ConfigError, match=r"^backward_input_s: is missing, but drawn runs 0I0"):
        makespans.of(drawn("0F0 0I0 0W0"))


def test_anything_but_schedules_and_costs_is_refused():
    schedule = drawn("0F0 0B0")

    with pytest.raises(ConfigError, match=r"like: .* of type Program; expected a Schedule"):
        Makespans(lower(schedule), COSTS)
    with pytest.raises(ConfigError, match="costs: None; expected Costs"):
        Makespans(schedule, None)
    with pytest.raises(ConfigError, match=r"schedule: .* of type Program; expected a Schedule"):
        Makespans(schedule, COSTS).of(lower(schedule))


def test_costs_that_are_too_large_to_be_added_are_refused():
    schedule, costs = build("1f1b", ranks=2, microbatches=2), Costs.uniform(forward=1e308)

    for evaluate in (Makespans(schedule, costs).of, lambda table: simulate(table, costs)):
        with pytest.raises(ConfigError, match="costs: they add up to more seconds than a number can hold"):
            evaluate(schedule)


def test_recomputation_may_be_in_some_schedules_of_a_shape():
    makespans = Makespans(drawn("0F0 0B0", "1F0 1B0"), replace(COSTS, recompute_s=(0.5,)))

    assert makespans.of(drawn("0F0 0R0 0B0", "1F0 1B0")) == pytest.approx(1 + 0.1 + 1 + 2 + 0.1 + 2)
    assert makespans.of(drawn("0F0 0R0 0I0 0W0", "1F0 1R0 1B0")) == pytest.approx(1 + 0.1 + 1 + 0.5 + 2 + 0.1 + 2)
    assert [makespans.of(drawn(line, "1F0 1B0")) for line in ("0F0 0B0 0R0", "0R0 0F0 0B0")] == [inf, inf]


def test_slices_and_overlapped_pairs_count():
    sliced, pairs = build("seq1f1b", ranks=2, microbatches=4, slices=2), build("dualpipe", ranks=4, microbatches=8)
    costs = Costs.uniform(transfer=0.25, overlap_factor=0.75, microbatch_compute_factor=tuple(np.arange(1.0, 9.0)))

    assert Makespans(sliced, COSTS).of(sliced) == simulate(lower(sliced), COSTS).makespan_s
    assert (pairs.joined & (pairs.op == Kind.FORWARD)).any()
    assert Makespans(pairs, costs).of(pairs) == simulate(lower(pairs), costs).makespan_s
