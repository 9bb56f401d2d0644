"""Every action is there once, on its rank, after what it needs there; each way to break this is refused by name."""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.ir.split_backwards import with_split_backwards
from penstock.placement import Placement
from penstock.proofs import check, prove_weight_order
from tests.proofs.tables import (
    VALID,
    assert_refused,
    edited,
    find,
    refusal,
    schedule_of,
    swapped,
    without,
)
from tests.support.local_pipelines import error_of

SMALL = """
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1
"""
SPLIT = """
0F0 0F1 0I0 0W0 0I1 0W1
1F0 1I0 1F1 1I1 1W0 1W1
"""


@pytest.mark.feature("B9")
def test_slices_and_several_stages_per_rank_pass():
    check(schedule_of("0F0.0 0F0.1 1F0.0 1F0.1 1B0.1 0B0.1 1B0.0 0B0.0", placement=Placement.loop(1, 2), slices=2))


@pytest.mark.parametrize("schedule", VALID)
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_a_duplicate_is_refused_where_it_stands(schedule, kind):
    last = schedule.num_ranks - 1
    text = str(Action(kind, last, 1))
    rank, position = find(schedule, text)
    twice = edited(schedule, lambda orders: orders[rank].append(orders[rank][position]))

    assert_refused(
        twice,
        (rank, len(schedule[rank]), text),
        f"is a duplicate of {text} (rank {rank}, position {position})",
        "Drop one",
    )


@pytest.mark.feature("D7")
@pytest.mark.parametrize("schedule", VALID)
@pytest.mark.parametrize(
    ("prepare", "missing", "place", "what"),
    [
        (None, "0B1", "0F1", "backward"),
        (None, "0F1", "0B1", "forward"),
        (with_split_backwards, "0W1", "0I1", "weight gradient"),
        (with_split_backwards, "0I1", "0W1", "input gradient"),
    ],
)
def test_a_missing_action_is_refused_at_the_one_that_needs_it(schedule, prepare, missing, place, what):
    broken = without(prepare(schedule) if prepare else schedule, missing)

    assert_refused(broken, place, f"has no {what}; expected one {missing}", f"Add {missing}")


OFF_RANK = "is on the wrong rank: stage 0 is held by rank 0"
REFUSED = {
    "missing altogether": (schedule_of(SMALL, microbatches=3), (1, 4, ""), ["1F2 and 1B2 (or its I and W) are mis"]),
    "on another rank, last": (schedule_of("0F0 0B0\n1F0 1B0 0F1"), (1, 2, "0F1"), [OFF_RANK, "Move it to rank 0"]),
    "on another rank, first": (schedule_of("0F0 0B0\n0F1 1F0 1B0"), (1, 0, "0F1"), [OFF_RANK]),
    "off its route": (
        schedule_of("0F0 0B0 1F0 1B0", placement=Placement.explicit([0, 0], [[0], [1]])),
        (0, 2, "1F0"), ["does not travel the route of stage 1", "route"],
    ),
    "a weight part before its input part": (
        swapped(schedule_of(SPLIT), "1I0", "1W0"),
        (1, 1, "1W0"), ["runs before its input gradient 1I0 (position 4)", "Move 1I0 before it"],
    ),
    "a stage before the one that feeds it": (
        schedule_of("1F0 0F0 1B0 0B0", placement=Placement.loop(1, 2)),
        (0, 0, "1F0"), ["runs before 0F0 (position 1), whose result it needs", "Move 0F0"],
    ),
    "a pair of an action and what it needs": (
        schedule_of("(0F0;0B0)OVERLAP_F_B"), (0, 1, "0B0"), ["is paired with 0F0 (position 0)", "Take the pair apart"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("schedule", "place", "words"), REFUSED.values(), ids=REFUSED)
def test_an_action_that_is_out_of_place_is_refused_there(schedule, place, words):
    assert_refused(schedule, place, *words)


def test_microbatches_in_a_row_are_missing_in_one_line_per_stage():
    error = refusal(schedule_of(SMALL, microbatches=5))

    assert [found.rank for found in error.violations] == [0, 1]
    for rank, found in enumerate(error.violations):
        missing = f"{rank}F2 to {rank}F4 and {rank}B2 to {rank}B4 (or their I and W)"
        assert found.problem.startswith(f"{missing} are missing")
        assert found.fix == f"Add {missing}"


def test_slices_are_missing_each_for_itself():
    one_rank = Placement.loop(1, 1)
    error = refusal(schedule_of("0F0.0 0F0.1 0F3.0 0F3.1", placement=one_rank, slices=2))

    assert [found.problem.partition(";")[0] for found in error.violations] == [
        "0F1 to 0F2 are missing",
        "0F1.1 to 0F2.1 are missing",
    ]


@pytest.mark.parametrize("typo", ["1F9", "1B3"])
def test_a_microbatch_that_one_action_names_beyond_a_gap_is_told_first_as_a_likely_typo(typo):
    orders = SMALL.replace("1F1", typo)
    error = refusal(schedule_of(orders))

    assert (error.violations[0].rank, error.violations[0].action) == (1, typo)
    assert error.violations[0].problem == (
        f"alone names microbatch {typo[2]}, and nothing names microbatch 2; it may be a typo"
    )
    assert "typo" not in "".join(found.problem for found in error.violations[1:])
    assert len(error.violations) <= 6


def test_a_microbatch_that_several_actions_name_is_no_typo():
    error = refusal(schedule_of("0F0 0F2 0B0 0B2\n1F0 1B0 1F2 1B2"))

    assert not any("typo" in found.problem for found in error.violations)


@pytest.mark.parametrize("kept", ["0I0", "0W0"])
def test_a_whole_and_a_split_backward_of_one_action_are_refused(kept):
    dropped = {"0I0": "0W0", "0W0": "0I0"}[kept]
    both = without(schedule_of(SPLIT.replace("0F1", "0F1 0B0")), dropped)

    assert_refused(
        both, (0, 2, "0B0"), f"computes again what {kept} (rank 0, position 3)", "Drop the B, or the I and the W"
    )


@pytest.mark.parametrize("schedule", VALID)
def test_a_backward_before_its_forward_is_refused_with_both_positions(schedule):
    broken = swapped(schedule, "0F1", "0B1")
    _, later = find(broken, "0F1")

    error = assert_refused(broken, "0B1", f"runs before its forward 0F1 (position {later})", "Move 0F1")
    assert not any("waits for" in violation.problem for violation in error.violations)


def test_a_pair_without_its_partner_is_refused():
    schedule = schedule_of(SMALL)
    joined = schedule.joined.copy()
    joined[-1] = True

    assert_refused(replace(schedule, joined=joined), (1, 3, "1B1"), "no partner follows")


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
