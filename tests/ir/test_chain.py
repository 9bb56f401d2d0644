"""Chains of schedules: the order of each rank, what stays feasible, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ConfigError, ScheduleError
from penstock.ir.action import Action, OverlappedPair
from penstock.ir.chain import chain
from penstock.ir.operations import Kind
from penstock.ir.recompute import with_recompute
from penstock.ir.transports import MODELS
from penstock.lowering import lower
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.support.grids import assert_grid
from tests.support.strategies import feasible_schedules


@pytest.mark.feature("X25")
def test_forwards_of_the_first_model_come_before_the_second_one_and_its_backwards_after_it():
    assert_grid(
        chain(build("1f1b", ranks=2, microbatches=3), build("zb-h1", ranks=2, microbatches=3)),
        """
        rank 0: 0F0 0F1 0F2 2F0 2F1 2I0 2W0 2F2 2I1 2W1 2I2 2W2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 3W2 1B0 1B1 1B2
        """,
    )


@pytest.mark.feature("X25")
def test_models_run_on_the_ranks_that_are_named():
    encoder, decoder = build("gpipe", ranks=1, microbatches=2), build("1f1b", ranks=2, microbatches=2)

    chained = chain(encoder, decoder, ranks=[[2], [1, 0]])

    assert_grid(
        chained,
        """
        rank 0: 2F0 2B0 2F1 2B1
        rank 1: 1F0 1F1 1B0 1B1
        rank 2: 0F0 0F1 0B0 0B1
        """,
    )
    assert chained.placement == ps.Placement.explicit([2, 1, 0])


def test_recomputations_stay_before_their_backwards():
    encoder, decoder = (build("gpipe", ranks=1, microbatches=2) for _ in range(2))

    chained = chain(with_recompute(encoder), decoder)

    assert_grid(chained, "0F0 0F1 1F0 1F1 1B0 1B1 0R0 0B0 0R1 0B1")
    assert check(chained).peak_activations == [2]
    assert check(chain(encoder, decoder)).peak_activations == [4]


def test_pairs_stay_pairs_in_the_last_model_alone():
    schedule = build("dualpipe-v", ranks=2, microbatches=6)

    chained = chain(schedule, schedule)

    assert schedule.joined.any()
    assert set(chained.stage[chained.joined]) <= {4, 5, 6, 7}
    assert chained.joined.sum() == schedule.joined.sum()
    check(chained)


def test_a_pair_of_a_forward_and_a_backward_is_none_where_the_second_model_is_on_other_ranks():
    pair = OverlappedPair(Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0))
    order = [Action(Kind.FORWARD, 0, 0), pair, Action(Kind.BACKWARD, 0, 1)]
    encoder = ps.Schedule.from_actions("pairs", ps.Placement.line(1), [order], num_microbatches=2)

    chained = chain(encoder, build("gpipe", ranks=1, microbatches=2), ranks=[[0], [1]])

    check(chained)  # the decoder begins its backwards when it has run all forwards
    assert not chained.joined.any()


def test_two_routes_go_on_as_two_routes():
    chained = chain(build("dualpipe", ranks=2, microbatches=4), build("chimera", ranks=2, microbatches=4))

    assert chained.placement.routes == ((0, 1, 4, 5), (2, 3, 6, 7))
    check(lower(chained))


@pytest.mark.feature("X25")
@given(feasible_schedules(), st.randoms(use_true_random=False))
def test_any_chain_can_run_under_every_transport_and_keeps_the_order_of_each_model(schedule, chance):
    ranks = list(range(schedule.num_ranks))
    chance.shuffle(ranks)

    chained = chain(schedule, schedule, ranks=[range(schedule.num_ranks), ranks])

    for model in MODELS:
        check(lower(chained, transport=model.name), transport=model.name)
    num_stages = schedule.num_stages
    for rank, new_rank in enumerate(ranks):
        last = [action for action in actions_of(chained, new_rank) if action[1] >= num_stages]
        first = [action for action in actions_of(chained, rank) if action[1] < num_stages]
        order = [(kind, stage - num_stages, *rest) for kind, stage, *rest in last]
        assert order == actions_of(schedule, rank)
        assert first == sorted(order, key=lambda action: action[0] != Kind.FORWARD)


def actions_of(schedule, rank):
    """The actions of a rank as tuples of kind, stage, microbatch and slice."""
    rows = schedule.ranks[rank]
    columns = (schedule.kind, schedule.stage, schedule.microbatch, schedule.slice)
    return list(zip(*(column[rows].tolist() for column in columns), strict=True))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_chains_with_others(name):
    schedule = build(name, ranks=2, microbatches=4)
    partners = {2: ["chimera"], 1: ["1f1b", "zbv"]}[len(schedule.placement.routes)]

    for partner in partners:
        other = build(partner, ranks=2, microbatches=4, forward_only=schedule.is_forward_only)
        for chained in (chain(schedule, other), chain(other, schedule)):
            check(lower(chained))
            assert chained.num_actions == schedule.num_actions + other.num_actions


def test_a_chain_of_chains_is_the_chain_of_all():
    first, second, third = (build(name, ranks=2, microbatches=4) for name in ("gpipe", "zb-h1", "1f1b"))

    assert chain(chain(first, second), third) == chain(first, second, third) == chain(first, chain(second, third))
    assert chain(first)[0] == first[0]


def test_what_remains_for_an_evaluation_is_the_chain_of_what_remains_of_each():
    first, second = (build(name, ranks=2, microbatches=4) for name in ("zb-h1", "1f1b"))

    assert chain(first, second).forward_only() == chain(first.forward_only(), second.forward_only())


def test_a_chain_is_written_and_read():
    chained = chain(build("1f1b", ranks=2, microbatches=2), build("zbv", ranks=2, microbatches=2))

    assert ps.Schedule.from_json(chained.to_json()) == chained


# ---- what is refused


def refusal(*schedules, **options):
    with pytest.raises(ConfigError) as caught:
        chain(*schedules, **options)
    return str(caught.value)


def built(name="gpipe", microbatches=2, **options):
    return build(name, ranks=2, microbatches=microbatches, **options)


@pytest.mark.feature("X25")
def test_schedules_that_cannot_follow_one_another_are_refused():
    assert refusal() == "schedules: none are given; pass one for each model"
    assert refusal(built(), lower(built())).startswith("schedules: Program('gpipe', ranks=2")
    assert refusal(built(), built("1f1b", 4)) == (
        "microbatches: gpipe has 2 microbatches, 1f1b has 4 microbatches; make them alike"
    )
    assert refusal(built("seq1f1b", slices=2), built("1f1b")) == (
        "slices: seq1f1b has 2 slices, 1f1b has 1 slice; make them alike"
    )
    assert refusal(built(forward_only=True), built("1f1b")) == (
        "forward_only: gpipe has forwards alone, 1f1b has backwards too; make them alike"
    )
    assert refusal(built("dualpipe", 4), built("1f1b", 4)) == (
        "routes: dualpipe has 2 routes, 1f1b has 1 route; make them alike"
    )
    in_turn = replace(built("dualpipe", 4), name="in turn", route_of_microbatch=np.arange(4) % 2)
    assert refusal(built("dualpipe", 4), in_turn) == (
        "routes: microbatch 1 travels route 0 of dualpipe, but route 1 of in turn; make them alike"
    )


@pytest.mark.parametrize(
    "ranks", [[[0, 1]], [[0, 1], [1]], [[0, 1], [1, 1]], [[0, 1], [-1, 0]], [0, 1], 2, [[0, 1], [0.5, 1]]]
)
def test_ranks_that_are_not_those_of_the_schedules_are_refused(ranks):
    assert refusal(built(), built(), ranks=ranks) == (
        f"ranks: {ranks}; expected one list for each schedule, of 2 and 2 different ranks from 0 on"
    )


def test_a_rank_without_a_stage_is_refused():
    with pytest.raises(ScheduleError, match=r"every rank from 0 to the largest must hold a stage"):
        chain(built(), built(), ranks=[[0, 1], [3, 4]])
