"""The registry: every family by name, its shapes, and what holds for all of their schedules."""

import pytest
from hypothesis import given

from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.ir.deps import predecessors
from penstock.ir.walk import walk
from penstock.schedules import FAMILIES, build
from tests.strategies import schedules


@given(schedules())
def test_every_stage_and_microbatch_has_its_actions_once_on_its_rank(schedule):
    kinds = [Kind.FORWARD] if schedule.is_forward_only else [Kind.FORWARD, Kind.BACKWARD]
    for rank, order in enumerate(schedule):
        stages = schedule.placement.stages_of_rank[rank]
        expected = [(k, s, m) for k in kinds for s in stages for m in range(schedule.num_microbatches)]
        assert sorted((action.kind, action.stage, action.microbatch) for action in order) == sorted(expected)


@given(schedules())
def test_every_schedule_can_run_to_its_end(schedule):
    duration = schedule.kind + 1.0

    assert walk(schedule.offsets, predecessors(schedule), schedule.joined, duration).is_complete


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_builds_under_its_own_name(name):
    schedule = build(name, ranks=2, microbatches=3)

    assert schedule.name == name == FAMILIES[name].name
    assert (schedule.num_ranks, schedule.num_microbatches, schedule.num_slices) == (2, 3, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_only_builds_no_backward(name):
    assert build(name, ranks=2, microbatches=3, forward_only=True).is_forward_only


def test_stages_can_be_given_in_total_or_per_rank():
    by_total = build("forward-only", ranks=2, microbatches=2, stages=6)

    assert by_total == build("forward-only", ranks=2, microbatches=2, stages_per_rank=3)
    assert by_total == build("forward-only", ranks=2, microbatches=2, stages=6, stages_per_rank=3)
    assert build("forward-only", ranks=2, microbatches=2, stages=5).num_stages == 5


@pytest.mark.parametrize(
    ("name", "given_", "told"),
    [
        ("1f2b", {}, r"there is no schedule '1f2b'.*Did you mean '1f1b'"),
        ("gpipe", {"ranks": 0}, "ranks: 0 is below 1"),
        ("gpipe", {"microbatches": -1}, "microbatches: -1 is below 1"),
        ("gpipe", {"slices": 0}, "slices: 0 is below 1"),
        ("gpipe", {"stages_per_rank": -2}, "stages_per_rank: -2 is below 1"),
        ("gpipe", {"stages_per_rank": 2}, "gpipe takes 1 stage per rank, got 2"),
        ("gpipe", {"stages": 3}, "gpipe takes 1 stage per rank, not 3 on 2"),
        ("forward-only", {"stages": 1}, "1 stages leave some of 2 ranks empty; give 2 or more"),
        ("forward-only", {"stages": 4, "stages_per_rank": 3}, "4 stages on 2 ranks are not 3 per rank"),
        ("gpipe", {"slices": 2}, "gpipe does not cut microbatches, got 2"),
        ("gpipe", {"warmup": "eager"}, "gpipe has no option 'warmup'"),
    ],
)
def test_what_a_family_cannot_do_is_refused(name, given_, told):
    with pytest.raises(ConfigError, match=told):
        build(name, **{"ranks": 2, "microbatches": 2, **given_})


@pytest.mark.parametrize("key", ["stages", "stages_per_rank"])
def test_no_stages_are_refused(key):
    with pytest.raises(ConfigError, match=f"{key}: 0 is below 1"):
        build("gpipe", ranks=2, microbatches=2, **{key: 0})


def test_a_schedule_that_no_memory_holds_is_refused_before_it_is_made():
    with pytest.raises(ConfigError, match="10,000,000,000 forwards; at most 50,000,000 fit in memory"):
        build("1f1b", ranks=100_000, microbatches=100_000)
