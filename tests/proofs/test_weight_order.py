"""The weight gradients of a stage in the order of its input gradients: every family has it, and a swap is named."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.proofs import check, prove_weight_order
from penstock.schedules import FAMILIES, build
from tests.local_pipelines import error_of


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("microbatches", [8, 16])
def test_every_family_takes_weight_gradients_in_order(name, microbatches):
    ranks = 1 if name == "sequential" else 4
    schedule = build(name, ranks=ranks, microbatches=microbatches)

    check(schedule, weight_order=True)
    check(lower(schedule), weight_order=True)


def one_stage(*texts):
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
    order = [Action(kinds[text[0]], 0, int(text[1])) for text in texts]
    return Schedule.from_actions("one stage", Placement.line(1), [order], num_microbatches=2)


@pytest.mark.parametrize(
    ("order", "named"),
    [
        (("F0", "F1", "I0", "I1", "W1", "W0"), ("0W1", "0I0")),
        (("F0", "F1", "I0", "B1", "W0"), ("0B1", "0I0")),
    ],
)
def test_both_actions_are_named(order, named):
    schedule = one_stage(*order)
    check(schedule)

    error = error_of(check, schedule, weight_order=True)

    assert isinstance(error, ScheduleError)
    assert len(error.violations) == 1
    assert named[0] in str(error)
    assert named[1] in error.violations[0].problem


def test_a_whole_backward_between_two_pairs_is_in_order():
    check(one_stage("F0", "F1", "I0", "W0", "B1"), weight_order=True)
    check(one_stage("F0", "F1", "B1", "I0", "W0"), weight_order=True)


def test_only_the_stages_asked_for_are_proved():
    schedule = one_stage("F0", "F1", "I0", "I1", "W1", "W0")

    prove_weight_order(schedule, [])
    assert isinstance(error_of(prove_weight_order, schedule, [0]), ScheduleError)


def test_copies_of_a_part_on_one_rank_have_one_queue():
    """Two routes over one rank: the W of each route is in order by itself, but not in that of the shared module."""
    placement = Placement.bidirectional(1)
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT)
    order = [Action(kind, stage, stage) for kind in kinds for stage in (0, 1)]
    order += [Action(Kind.BACKWARD_WEIGHT, stage, stage) for stage in (1, 0)]
    schedule = Schedule.from_actions("two routes", placement, [order], num_microbatches=2, route_of_microbatch=[0, 1])
    check(schedule)

    assert "1W1" in str(error_of(check, schedule, weight_order=True))
