"""The registry: every family by name, its shapes, and what holds for all of their schedules."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given

from penstock.errors import ConfigError
from penstock.ir.action import Action, Kind
from penstock.ir.operations import Op
from penstock.ir.recompute import with_recompute
from penstock.schedules import FAMILIES, build
from tests.support.strategies import schedules


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "forward-only"])
def test_every_family_can_run_its_forwards_again(name):
    plain = build(name, ranks=2, microbatches=4)

    recomputed = build(name, ranks=2, microbatches=4, recompute=True)

    assert recomputed == with_recompute(plain)
    assert (recomputed.name, Op.RECOMPUTE in recomputed.ops) == (plain.name, True)
    assert build(name, ranks=2, microbatches=4, recompute=True, forward_only=True) == plain.forward_only()


@pytest.mark.feature("B4")
@given(schedules())
def test_every_stage_and_microbatch_has_its_actions_once_on_its_rank(schedule):
    placement = schedule.placement
    for rank in range(schedule.num_ranks):
        rows = range(schedule.offsets[rank], schedule.offsets[rank + 1])
        actions = Counter(schedule.action(row) for row in rows)
        for stage, microbatch, part in product(
            placement.stages_of_rank[rank], range(schedule.num_microbatches), range(schedule.num_slices)
        ):
            if placement.route_of_stage[stage] != schedule.route_of_microbatch[microbatch]:
                continue
            counts = [actions.pop(Action(kind, stage, microbatch, part), 0) for kind in Kind]
            forward_alone, whole, split = [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0]
            assert counts in ([forward_alone] if schedule.is_forward_only else [whole, split])
        assert not actions


@pytest.mark.feature("0.4", "0.5")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_builds_under_its_own_name_and_without_backwards_on_request(name):
    ranks, microbatches = FAMILIES[name].example

    forwards = build(name, ranks=ranks, microbatches=microbatches, forward_only=True)

    assert forwards == build(name, ranks=ranks, microbatches=microbatches).forward_only()
    assert forwards.name == name
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    assert schedule.name == name == FAMILIES[name].name
    assert (schedule.num_ranks, schedule.num_microbatches, schedule.num_slices) == (ranks, microbatches, 1)


def test_as_many_slices_as_can_be_numbered_are_built():
    assert build("seq1f1b", ranks=1, microbatches=1, slices=32_768).slice.max() == 32_767


def test_stages_can_be_given_in_total_or_per_rank():
    by_total = build("forward-only", ranks=2, microbatches=2, stages=6)

    assert by_total == build("forward-only", ranks=2, microbatches=2, stages_per_rank=3)
    assert by_total == build("forward-only", ranks=2, microbatches=2, stages=6, stages_per_rank=3)
    assert build("forward-only", ranks=2, microbatches=2, stages=5).num_stages == 5


@pytest.mark.feature("0.3", "B20")
@pytest.mark.parametrize(
    ("name", "given_", "told"),
    [
        ("deepspeed-train", {}, r"no schedule 'deepspeed-train': .*`penstock show 1f1b --lowered --to deepspeed`"),
        ("deepspeed-inference", {}, r"`penstock show 1f1b --forward-only --lowered --to deepspeed`"),
        ("1f2b", {}, r"there is no schedule '1f2b'.*Did you mean '1f1b'"),
        ("gpipe", {"ranks": 0}, "ranks: 0 is below 1"),
        ("gpipe", {"slices": 0}, "slices: 0 is below 1"),
        ("seq1f1b", {"slices": 40_000}, "slices: 40000 are too many; at most 32,768 can be numbered, use fewer"),
        ("gpipe", {"ranks": "4"}, "ranks: '4' of type str; give a whole number of 1 or more"),
        ("gpipe", {"ranks": True}, "ranks: True of type bool; give a whole number of 1 or more"),
        ("gpipe", {"microbatches": None}, "microbatches: None; give"),
        ("gpipe", {"stages_per_rank": -2}, "stages_per_rank: -2 is below 1"),
        ("gpipe", {"stages_per_rank": 2}, "gpipe takes 1 stage per rank, got 2; leave it out, or take a family"),
        ("1f1b", {"stages_per_rank": 2}, "with 2, such as interleaved-1f1b, 1f1b-v, zbv$"),
        ("zbv", {"stages_per_rank": 3}, "with 3, such as interleaved-1f1b, looped-bfs, breadth-depth$"),
        ("gpipe", {"stages": 3}, "gpipe takes 1 stage per rank, not 3 on 2; give 2$"),
        ("forward-only", {"stages": 1}, "stages: 1 stage for 2 ranks; give 2 or more"),
        ("forward-only", {"stages": 4, "stages_per_rank": 3}, "4 stages on 2 ranks and 3 per rank are given; give one"),
        ("gpipe", {"slices": 2}, "gpipe does not cut microbatches, got 2"),
        ("gpipe", {"warmup": "eager"}, "gpipe has no option 'warmup'"),
    ],
)
def test_what_a_family_cannot_do_is_refused(name, given_, told):
    with pytest.raises(ConfigError, match=told):
        build(name, **{"ranks": 2, "microbatches": 2, **given_})


def test_a_schedule_that_no_memory_holds_is_refused_before_it_is_made():
    with pytest.raises(ConfigError, match="10,000,000,000 forwards; at most 50,000,000 fit in memory"):
        build("1f1b", ranks=100_000, microbatches=100_000)
