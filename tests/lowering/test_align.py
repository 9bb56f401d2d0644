"""Collectives of different ranks start together, in the same order, as far as computations and room let them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import hot
from penstock.ir.operations import Op
from penstock.ir.program import Program
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.proofs import check
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.lowering.programs import computations, drawn, lines
from tests.proofs.tables import schedule_of
from tests.support.mesh_pipelines import Job, gradients_after, two_steps
from tests.support.strategies import feasible_schedules

LOOPED = build("looped-bfs", ranks=3, microbatches=3, stages_per_rank=2)
COLLECTIVES = (Op.UNSHARD, Op.REDUCE_GRADIENT)


def without_messages(program):
    return [" ".join(word for word in line.split() if "_F" not in word and "_B" not in word) for line in drawn(program)]


@pytest.mark.feature("X22")
def test_gathers_start_with_the_first_of_them_and_reductions_with_the_last():
    plain, aligned = (without_messages(lower(LOOPED, shard="optimizer", aligned=aligned)) for aligned in (False, True))

    assert plain == lines("""
0UNSHARD 0F0 0F1 3UNSHARD 0F2 3F0 3F1 3F2 3B0 3B1 3B2 3REDUCE_GRAD 3RESHARD 0B0 0B1 0B2 0REDUCE_GRAD 0RESHARD
1UNSHARD 1F0 1F1 4UNSHARD 1F2 4F0 4F1 4F2 4B0 4B1 4B2 4REDUCE_GRAD 4RESHARD 1B0 1B1 1B2 1REDUCE_GRAD 1RESHARD
2UNSHARD 2F0 2F1 5UNSHARD 2F2 5F0 5F1 5F2 5B0 5B1 5B2 5REDUCE_GRAD 5RESHARD 2B0 2B1 2B2 2REDUCE_GRAD 2RESHARD
""")
    assert aligned == lines("""
0UNSHARD 0F0 0F1 3UNSHARD 0F2 3F0 3F1 3F2 3B0 3B1 3B2 3REDUCE_GRAD 3RESHARD 0B0 0B1 0B2 0REDUCE_GRAD 0RESHARD
1UNSHARD 1F0 4UNSHARD 1F1 1F2 4F0 4F1 4F2 4B0 4B1 4B2 1B0 4REDUCE_GRAD 4RESHARD 1B1 1B2 1REDUCE_GRAD 1RESHARD
2UNSHARD 2F0 5UNSHARD 2F1 2F2 5F0 5F1 5F2 5B0 5B1 5B2 2B0 2B1 5REDUCE_GRAD 5RESHARD 2B2 2REDUCE_GRAD 2RESHARD
""")


@pytest.mark.feature("X22")
def test_reductions_of_whole_replicas_start_together_too():
    program = lower(LOOPED, aligned=True)

    assert without_messages(program)[1:] == lines("""
1F0 1F1 1F2 4F0 4F1 4F2 4B0 4B1 4B2 1B0 4REDUCE_GRAD 1B1 1B2 1REDUCE_GRAD
2F0 2F1 2F2 5F0 5F1 5F2 5B0 5B1 5B2 2B0 2B1 5REDUCE_GRAD 2B2 2REDUCE_GRAD
""")


def test_where_there_is_no_room_collectives_stay_where_they_are():
    program = lower(LOOPED, shard="full", residency=1, aligned=True)

    assert drawn(program) == drawn(lower(LOOPED, shard="full", residency=1))


# ---- what holds for every program


def starts_of(program, op, costs=None):
    """Per rank, the times at which its collectives of one kind start, in order, where they take no time themselves."""
    timeline = simulate(program, costs or Costs.uniform())
    return [
        [timeline.start_s[row] for row in range(*program.offsets[rank : rank + 2]) if program.op[row] == op]
        for rank in range(len(program))
    ]


def collectives_of(program):
    """Per rank, the collectives in order, gathers and reductions each by themselves, since they pass each other."""
    return [[[row.stage for row in rank if row.op is op] for op in COLLECTIVES] for rank in program]


def assert_between(starts, aligned_starts, extreme):
    """Each starts between where it started and where the first or last of its number did."""
    for number in range(max(map(len, starts), default=0)):
        group = [
            (rank[number], other[number])
            for rank, other in zip(starts, aligned_starts, strict=True)
            if number < len(rank)
        ]
        common = extreme(start for start, _ in group)
        for start, aligned in group:
            assert min(start, common) <= aligned <= max(start, common)


@pytest.mark.parametrize("shard", ["none", "full"])
def test_collectives_that_come_to_one_place_keep_their_order(shard):
    orders = "0F0 3F0 3I0 3W0 0I0 0W0\n1F0 2F0 2I0 1I0 2W0 1W0"
    schedule = schedule_of(orders, placement=Placement.explicit([0, 1, 1, 0]))

    options = {"shard": shard, "residency": None, "look_ahead": 0}
    assert collectives_of(lower(schedule, aligned=True, **options)) == collectives_of(lower(schedule, **options))


@pytest.mark.feature("X22")
@given(
    schedule=feasible_schedules(),
    shard=st.sampled_from(["none", "full", "optimizer"]),
    residency=st.one_of(st.none(), st.integers(2, 4)),
    look_ahead=st.integers(0, 3),
)
def test_random_orders_have_the_same_collectives_in_the_same_order_and_are_proved(
    schedule, shard, residency, look_ahead
):
    options = {"shard": shard, "residency": residency, "look_ahead": look_ahead}
    plain, aligned = (lower(schedule, **options, aligned=aligned) for aligned in (False, True))

    check(aligned, residency=residency if shard == "full" else None)
    assert computations(aligned) == computations(Program.from_schedule(schedule))
    assert collectives_of(aligned) == collectives_of(plain)
    for op, extreme in zip(COLLECTIVES, (min, max), strict=True):
        assert_between(starts_of(plain, op), starts_of(aligned, op), extreme)
    assert simulate(aligned, Costs.uniform()).makespan_s == simulate(plain, Costs.uniform()).makespan_s


CASES = [
    ("interleaved-1f1b", {"stages_per_rank": 2}, (3.0, 1.0), (12.0, 6.0)),
    ("looped-bfs", {"stages_per_rank": 2}, (3.0, 0.0), (12.0, 6.0)),
    ("zbv", {}, (6.0, 0.0), (11.0, 3.0)),
    ("dualpipe-v", {}, (6.0, 0.0), (7.0, 0.0)),
]
"""A family, and the time between the first and the last rank that gather or reduce, added up, before and after."""


@pytest.mark.feature("X22")
@pytest.mark.parametrize(("name", "options", "gathers", "reductions"), CASES)
def test_ranks_start_closer_together_and_the_makespan_is_no_longer(name, options, gathers, reductions):
    """The last reductions of ranks that have nothing left to compute start when they do."""
    schedule = build(name, ranks=4, microbatches=8, **options)
    programs = [lower(schedule, shard="optimizer", aligned=aligned) for aligned in (False, True)]

    for op, expected in zip(COLLECTIVES, (gathers, reductions), strict=True):
        spreads = [np.ptp(starts_of(program, op), axis=0).sum() for program in programs]
        assert spreads == list(expected)
    costs = Costs.uniform(unshard_s=0.5, reduce_s=0.5)
    plain, aligned = (simulate(program, costs).makespan_s for program in programs)
    assert aligned <= plain


def test_compiled_loops_place_the_same_rows(monkeypatch):
    schedule = build("interleaved-1f1b", ranks=4, microbatches=16, stages_per_rank=4)
    interpreted = lower(schedule, shard="full", residency=3, aligned=True)
    assert interpreted != lower(schedule, shard="full", residency=3)

    monkeypatch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)

    assert lower(schedule, shard="full", residency=3, aligned=True) == interpreted


# ---- a run


@pytest.mark.feature("X22")
@pytest.mark.parametrize(
    "options", [{"shard": "optimizer"}, {"shard": "full", "residency": 3}, {"shard": "none"}], ids=str
)
def test_a_run_has_the_same_bits(options):
    schedule = build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=4)
    programs = [lower(schedule, **options, aligned=aligned) for aligned in (False, True)]
    assert drawn(programs[0]) != drawn(programs[1])

    plain, aligned = (gradients_after(Job([8, 8]), program, two_steps, **options) for program in programs)

    assert plain.keys() == aligned.keys()
    assert [name for name in plain if not torch.equal(plain[name], aligned[name])] == []
