"""Gathers: whole for as long as used, few at once, as few as there can be, early where there is room."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.ir import hot
from penstock.ir.operations import Op
from penstock.ir.program import Program
from penstock.lowering import lower, place_gathers
from penstock.placement import Placement
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.lowering.programs import computations, drawn, groups, lines, program_of
from tests.support.strategies import feasible_schedules, schedules


def assert_becomes(before, after, *, residency, look_ahead=0, **sizes):
    assert drawn(place_gathers(program_of(before, **sizes), residency, look_ahead)) == lines(after)


def test_a_pair_of_two_stages_needs_two_places_and_is_not_cut():
    before = "0F0 1F0 (0F1;1B0) 1F1 1B1 0B0 0B1"
    after = "0UNSHARD 0F0 1UNSHARD 1F0 (0F1;1B0) 1F1 1B1 1RESHARD 0B0 0B1 0RESHARD"

    assert_becomes(before, after, residency=2, placement=Placement.loop(1, 2))
    with pytest.raises(ConfigError, match=r"residency: 1, but .* has overlapped pairs of two stages.*give 2 or more"):
        place_gathers(program_of(before, placement=Placement.loop(1, 2)), residency=1)


def test_stages_that_share_a_parameter_are_gathered_as_one_under_the_name_of_the_first():
    schedule = build("zbv", ranks=1, microbatches=2)

    program = lower(schedule, shard="full", residency=1, units=[(1, 0)])

    assert program.units == ((0, 1),)
    assert drawn(program)[0].split()[0] == "0UNSHARD"
    assert [str(row) for row in program[0] if not row.op.is_compute] == ["0UNSHARD", "0REDUCE_GRAD", "0RESHARD"]


def test_a_gather_is_behind_the_receives_that_are_posted_and_a_reshard_behind_the_sends():
    program = lower(build("looped-bfs", ranks=2, microbatches=1, stages_per_rank=2), shard="full", residency=1)

    assert drawn(program)[1].startswith("1RECV_F0 1UNSHARD 1F0 1SEND_F0 1RESHARD 3RECV_F0 3UNSHARD 3F0")


# ---- wrong values


@pytest.mark.parametrize("residency", [0, -1, True, 1.5, "2"])
def test_a_residency_that_is_none_is_refused(residency):
    with pytest.raises(ConfigError, match=r"residency: .*1 or more, or None for all"):
        lower(build("1f1b", ranks=2, microbatches=2), shard="full", residency=residency)


@pytest.mark.parametrize("look_ahead", [-1, False, None, 0.5])
def test_a_look_ahead_that_is_none_is_refused(look_ahead):
    with pytest.raises(ConfigError, match=r"look_ahead: .*a number of computations, 0 or more"):
        lower(build("1f1b", ranks=2, microbatches=2), shard="full", look_ahead=look_ahead)


def test_an_unknown_way_to_shard_is_refused_with_the_nearest():
    schedule = build("1f1b", ranks=2, microbatches=2)

    with pytest.raises(ConfigError, match=r"shard: .*expected one of none, optimizer, full.*Did you mean 'full'"):
        lower(schedule, shard="ful")
    with pytest.raises(ConfigError, match=r"shard: None"):
        lower(schedule, shard=None)


# ---- what holds for every program


def uses_of(program, rank):
    """Per computation of a rank, an overlapped pair being one, the units that it uses."""
    return [
        {int(program.unit_of_stage[row.stage]) for row in group}
        for group in groups(program, rank)
        if group[0].op.is_compute
    ]


def fewest_gathers(uses, residency):
    """The least number of gathers that any way to keep at most so many whole needs, found by trying all."""
    best = {frozenset(): 0}
    for needed in uses:
        after = {}
        for whole, count in best.items():
            rest = sorted(whole - needed)
            for size in range(min(len(rest), residency - len(needed)) + 1):
                for kept in combinations(rest, size):
                    now = frozenset(needed | set(kept))
                    after[now] = min(after.get(now, len(uses) * 2), count + len(needed - whole))
        best = after
    return min(best.values())


def events_of(program, rank):
    """(number of the computation that follows, `UNSHARD` or `RESHARD`, unit) of a rank, in order."""
    found, number = [], 0
    for group in groups(program, rank):
        if group[0].op.is_compute:
            number += 1
        elif group[0].op in (Op.UNSHARD, Op.RESHARD):
            found.append((number, group[0].op, group[0].stage))
    return found


def num_whole(program, rank):
    """How many units are whole while each computation of a rank runs."""
    changes = np.zeros(len(uses_of(program, rank)) + 1, int)
    for number, op, _ in events_of(program, rank):
        changes[number] += 1 if op is Op.UNSHARD else -1
    return np.cumsum(changes)[:-1]


def assert_gathers_rightly(before, after, residency, look_ahead):
    for rank in range(len(after)):
        uses = uses_of(before, rank)
        num_units = len(set().union(*uses))
        most = min(residency or num_units, num_units)
        stays, open_at = [], {}
        for number, op, unit in events_of(after, rank):
            if op is Op.UNSHARD:
                assert unit not in open_at
                open_at[unit] = number
            else:
                stays.append((open_at.pop(unit), number, unit))
        assert not open_at
        for at, needed in enumerate(uses):
            now = [unit for begin, end, unit in stays if begin <= at < end]
            assert len(now) == len(set(now))
            assert needed <= set(now)
        assert all(unit in uses[end - 1] for _, end, unit in stays)
        whole = num_whole(after, rank)
        assert whole.max(initial=0) <= most
        for unit in set(before.placement.stages_of_rank[rank]):
            own = sorted((begin, end) for begin, end, other in stays if other == unit)
            assert all((whole[end:begin] == most).any() for (_, end), (begin, _) in pairwise(own))
        for begin, end, unit in stays:
            first = next(at for at in range(begin, end) if unit in uses[at])
            assert first - begin <= look_ahead
            is_early = first - begin == look_ahead or begin == 0
            assert is_early or whole[begin - 1] == most


@given(
    schedule=feasible_schedules(),
    residency=st.one_of(st.none(), st.integers(2, 4)),
    look_ahead=st.integers(0, 4),
)
def test_random_orders_are_gathered_rightly_and_proved(schedule, residency, look_ahead):
    before = Program.from_schedule(schedule)

    after = lower(schedule, shard="full", residency=residency, look_ahead=look_ahead)

    assert computations(after) == computations(before)
    assert_gathers_rightly(before, after, residency, look_ahead)
    check(after, residency=residency)


@pytest.mark.feature("X3")
@pytest.mark.slow
@given(schedule=schedules(), residency=st.sampled_from([1, 2, 3, None]), look_ahead=st.integers(0, 3))
def test_every_schedule_of_the_registry_is_gathered_rightly_and_proved(schedule, residency, look_ahead):
    if schedule.joined.any() and residency == 1:
        residency = 2
    before = Program.from_schedule(schedule)

    after = lower(schedule, shard="full", residency=residency, look_ahead=look_ahead)

    assert_gathers_rightly(before, after, residency, look_ahead)
    check(after, residency=residency)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("transport", ["posted", "coalesced"])
def test_every_family_is_proved_under_every_transport_with_few_stages_whole(name, transport):
    ranks = 2 if name in ("dualpipe", "chimera") else 3
    schedule = build(name, ranks=1 if name == "sequential" else ranks, microbatches=6)
    for residency in (2, None):
        program = lower(schedule, transport, shard="full", residency=residency)
        facts = check(program, "all" if transport == "coalesced" else "pair_fifo", residency=residency)
        assert max(facts.peak_whole) <= (residency or schedule.num_stages)


@pytest.mark.feature("H4")
@given(schedule=feasible_schedules(), residency=st.integers(1, 3))
def test_without_a_look_ahead_there_are_as_few_gathers_as_there_can_be(schedule, residency):
    before = Program.from_schedule(schedule)
    if any(len(needed) > residency for rank in range(len(before)) for needed in uses_of(before, rank)):
        residency = 2

    after = place_gathers(before, residency, look_ahead=0)

    for rank in range(len(after)):
        found = sum(op is Op.UNSHARD for _, op, _ in events_of(after, rank))
        assert found == fewest_gathers(uses_of(before, rank), residency)


@pytest.mark.feature("X3")
@given(schedule=schedules())
def test_with_the_optimizer_sharded_each_stage_is_gathered_once_and_reduced_once(schedule):
    program = lower(schedule, shard="optimizer", residency=1)

    units = set(program.unit_of_stage.tolist())
    for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRADIENT):
        expected = [] if schedule.is_forward_only and op is Op.REDUCE_GRADIENT else sorted(units)
        assert sorted(program.stage[program.op == op].tolist()) == expected
    assert program == lower(schedule, shard="full", residency=None)


@given(schedule=schedules())
def test_without_shards_the_program_is_what_it_was_whatever_else_is_given(schedule):
    program = lower(schedule, residency=1, look_ahead=5, units=[(0,)])

    assert program == lower(schedule)
    assert not program.units
    assert program.digest() == lower(schedule).digest()


def test_compiled_loops_place_the_same_rows(monkeypatch):
    schedule = build("interleaved-1f1b", ranks=4, microbatches=16, stages_per_rank=4)
    interpreted = lower(schedule, shard="full", residency=2, look_ahead=2)

    monkeypatch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)

    assert lower(schedule, shard="full", residency=2, look_ahead=2) == interpreted
