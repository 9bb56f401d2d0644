"""The pass that lets forwards run again: where it puts them, and what it leaves alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ConfigError
from penstock.ir import hot
from penstock.ir.operations import Op
from penstock.ir.recompute import with_recompute
from penstock.lowering import lower
from penstock.proofs import check
from penstock.schedules import build
from tests.support.grids import assert_grid
from tests.support.strategies import feasible_schedules


@pytest.mark.feature("X17")
def test_each_forward_runs_again_right_before_its_backward():
    assert_grid(
        with_recompute(build("1f1b", ranks=2, microbatches=3)),
        """
        rank 0: 0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2
        rank 1: 1F0 1R0 1B0 1F1 1R1 1B1 1F2 1R2 1B2
        """,
    )


def test_of_a_split_backward_the_first_part_needs_it():
    assert_grid(
        with_recompute(build("zb-h1", ranks=2, microbatches=2), stages=[1]),
        """
        rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
        rank 1: 1F0 1R0 1I0 1F1 1R1 1I1 1W0 1W1
        """,
    )


@given(feasible_schedules())
def test_any_schedule_stays_feasible_and_holds_activations_for_a_backward_only(schedule):
    recomputed = with_recompute(schedule)

    facts = check(lower(recomputed))
    assert with_recompute(recomputed) is recomputed
    assert recomputed.select((recomputed.op != Op.RECOMPUTE).nonzero()[0]).digest() == schedule.digest()
    assert all(new <= old for new, old in zip(facts.peak_activations, check(schedule).peak_activations, strict=True))


@pytest.mark.feature("X17")
def test_forwards_that_find_room_for_their_activation_keep_it():
    assert_grid(
        with_recompute(build("1f1b", ranks=3, microbatches=4), activations=2),
        """
        rank 0: 0F0 0F1 0F2 0B0 0F3 0R1 0B1 0R2 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
        """,
    )


def test_a_split_backward_takes_room_until_its_second_part():
    assert_grid(
        with_recompute(build("zb-h1", ranks=3, microbatches=4), activations=2),
        """
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0R1 0I1 0W1 0R2 0I2 0W2 0I3 0W3
        rank 1: 1F0 1F1 1I0 1F2 1R1 1I1 1W0 1F3 1R2 1I2 1W1 1I3 1W2 1W3
        rank 2: 2F0 2I0 2F1 2R1 2I1 2F2 2R2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """,
    )


def test_activations_of_other_stages_take_room_and_stay():
    looped = build("interleaved-1f1b", ranks=1, microbatches=2, stages_per_rank=2)

    assert_grid(looped, "rank 0: 0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1")
    assert_grid(with_recompute(looped, [1], activations=1), "rank 0: 0F0 1F0 1R0 1B0 0F1 0B0 1F1 1R1 1B1 0B1")
    assert_grid(with_recompute(looped, [0], activations=1), "rank 0: 0F0 1F0 1B0 0F1 0R0 0B0 1F1 1B1 0R1 0B1")
    assert with_recompute(looped, activations=2) is looped


@pytest.mark.feature("X17")
@pytest.mark.parametrize("activations", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [3, 4, 11])
def test_the_forwards_of_1f1b_that_run_again_are_those_of_megatron(activations, microbatches):
    """Of each window of as many microbatches as a rank has under way, the first ones keep all."""
    schedule = with_recompute(build("1f1b", ranks=4, microbatches=microbatches), activations=activations)

    for rank in range(4):
        num_under_way = min(4 - rank - 1, microbatches) + 1
        has_room = min(num_under_way, microbatches) <= activations
        expected = [index for index in range(microbatches) if index % num_under_way >= activations - 1]
        found = [action.microbatch for action in schedule[rank] if action.kind == ps.Kind.RECOMPUTE]
        assert found == ([] if has_room else expected)


def test_less_room_takes_more_time_and_less_than_all_forwards_again():
    def outcome(recompute):
        schedule = build("1f1b", ranks=4, microbatches=8, recompute=recompute)
        return ps.simulate(schedule, ps.Costs.uniform()).makespan_s, check(schedule).peak_activations

    assert [outcome(recompute) for recompute in (4, 3, 2, 1, True)] == [
        (33, [4, 3, 2, 1]),
        (35, [3, 3, 2, 1]),
        (37, [2, 2, 2, 1]),
        (39, [1, 1, 1, 1]),
        (41, [1, 1, 1, 1]),
    ]


@pytest.mark.feature("X17")
@given(feasible_schedules(), st.integers(1, 4))
def test_any_schedule_keeps_no_more_than_there_is_room_for(schedule, activations):
    in_part = with_recompute(schedule, activations=activations)

    plain_peaks, peaks = check(schedule).peak_activations, check(lower(in_part)).peak_activations
    has_split_backwards = Op.BACKWARD_INPUT in schedule.ops
    for plain_peak, peak in zip(plain_peaks, peaks, strict=True):
        assert peak <= plain_peak
        assert plain_peak > activations or peak == plain_peak
        assert peak <= activations or has_split_backwards or schedule.joined.any()
    assert in_part is schedule or max(plain_peaks) > activations
    assert in_part.select((in_part.op != Op.RECOMPUTE).nonzero()[0]).digest() == schedule.digest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)
        assert with_recompute(schedule, activations=activations) == in_part


@pytest.mark.parametrize("activations", [0, -1, True, 1.5, "2"])
def test_room_for_what_is_no_number_of_activations_is_refused(activations):
    with pytest.raises(ConfigError, match=r"^activations: .*; expected a whole number of 1 or more"):
        with_recompute(build("1f1b", ranks=2, microbatches=2), activations=activations)


def test_a_forward_only_schedule_stays_as_it_is():
    schedule = build("1f1b", ranks=2, microbatches=2).forward_only()

    assert ps.with_recompute(schedule) is schedule


@pytest.mark.parametrize("stages", [[2], [0, -1], 1, [0.5], [True], "0", [[0]]])
def test_what_is_no_list_of_the_schedules_stages_is_refused(stages):
    with pytest.raises(ConfigError, match=r"^stages: .*; expected stages from 0 to 1"):
        with_recompute(build("1f1b", ranks=2, microbatches=2), stages=stages)


def test_stages_may_be_an_array():
    schedule = build("1f1b", ranks=2, microbatches=2)

    assert with_recompute(schedule, np.array([1])) == with_recompute(schedule, [1])


def test_anything_but_a_schedule_is_refused():
    with pytest.raises(ConfigError, match="expected a Schedule"):
        with_recompute(lower(build("1f1b", ranks=2, microbatches=2)))
