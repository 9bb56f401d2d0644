"""The pass that lets forwards run again: where it puts them, and what it leaves alone."""

import numpy as np
import pytest
from hypothesis import given

import penstock as ps
from penstock.errors import ConfigError
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
