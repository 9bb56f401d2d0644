"""A user's function gets the numbers and options that it names, and its schedule has the size that was asked for."""

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.recompute import with_recompute
from penstock.schedules import build
from penstock.schedules.phases import b, f, phases, repeat
from tests.support.grids import assert_grid

SIZE = {"ranks": 2, "microbatches": 2}


def all_forward_first(ranks, microbatches):
    for rank in range(ranks):
        yield [f"{rank}{kind}{microbatch}" for kind in "FB" for microbatch in range(microbatches)]


def looped(ranks, microbatches, stages_per_rank=2):
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        yield [f"{stage}F{microbatch}" for stage in stages for microbatch in range(microbatches)]


def noting(seen):
    """A function that notes its arguments."""

    def note(ranks, microbatches, stages=None, depth=1, share=0.5, eager=False, word="a", other=None):
        seen.update(locals())
        return all_forward_first(ranks, microbatches)

    return note


@pytest.mark.feature("B17")
def test_a_function_is_built_like_a_family():
    schedule = build(all_forward_first, **SIZE)

    assert schedule == build("gpipe", **SIZE)
    assert schedule.name == "all_forward_first"


def test_a_function_that_does_not_name_it_gets_its_forwards_alone_taken_out():
    assert_grid(build(all_forward_first, **SIZE, forward_only=True), "0F0 0F1\n1F0 1F1")


def test_a_function_that_names_it_decides_on_forwards_alone_itself():
    def forwards(ranks, microbatches, forward_only):
        return ["0F1 0F0 0B1 0B0", "1F1 1F0 1B1 1B0"] if not forward_only else ["0F0 0F1", "1F0 1F1"]

    assert_grid(build(forwards, **SIZE, forward_only=True), "0F0 0F1\n1F0 1F1")


def test_options_get_the_type_of_their_default():
    seen = {}

    build(noting(seen), **SIZE, depth="3", share="0.25", eager="true", word="b", other="c")

    assert {key: seen[key] for key in ("depth", "share", "eager", "word", "other")} == {
        "depth": 3,
        "share": 0.25,
        "eager": True,
        "word": "b",
        "other": "c",
    }


@pytest.mark.parametrize(
    ("asked", "num_stages"),
    [({}, 4), ({"stages_per_rank": 3}, 6), ({"stages": 2}, 2), ({"stages": 4, "stages_per_rank": 2}, 4)],
)
def test_stages_per_rank_are_those_asked_for_or_the_default_of_the_function(asked, num_stages):
    assert build(looped, **SIZE, **asked).num_stages == num_stages


@pytest.mark.parametrize(("asked", "stages"), [({"stages": 2}, 2), ({"stages_per_rank": 1}, 2), ({}, None)])
def test_the_total_of_stages_follows_from_those_per_rank(asked, stages):
    seen = {}

    build(noting(seen), **SIZE, **asked)

    assert seen["stages"] == stages


def test_numbers_without_a_default_are_one_stage_per_rank():
    def both(ranks, microbatches, stages, stages_per_rank):
        assert (stages, stages_per_rank) == (2, 1)
        return all_forward_first(ranks, microbatches)

    assert build(both, **SIZE).num_stages == 2


@pytest.mark.parametrize(
    ("function", "asked", "told"),
    [
        (all_forward_first, {"depth": "2"}, "depth: all_forward_first has no option 'depth'; its options: recompute"),
        (noting({}), {"dept": "2"}, "its options: depth, share, .*recompute.* Did you mean 'depth'"),
        (noting({}), {"depth": "two"}, "depth: 'two' is not a value of it; give a whole number"),
        (noting({}), {"eager": "1"}, "eager: '1' is not a value of it; give true or false"),
        (all_forward_first, {"stages_per_rank": 2}, "stages_per_rank: all_forward_first does not take it; add"),
        (all_forward_first, {"slices": 2}, "slices: all_forward_first does not take it; add"),
        (looped, {"stages": 5}, "stages: looped made a schedule with 4, but 5 were asked for"),
        (lambda ranks, microbatches: ["0F0", "1F0"], {}, "microbatches: <lambda> made a schedule with 1, but 2"),
        (lambda ranks, microbatches, depth: [], {}, "depth: <lambda> needs a value for it; give depth=VALUE"),
        (lambda ranks, /: [], {}, "takes 'ranks' by position only; leave out the /"),
        (lambda ranks: 1 // 0, {}, r"test_custom\.py:\d+: <lambda> failed: ZeroDivisionError"),
        (None, {}, "name: None; give the name of a family, or a function"),
        (max, {}, "max does not say what it takes"),
    ],
)
def test_what_a_function_cannot_do_is_refused(function, asked, told):
    with pytest.raises(ConfigError, match=told):
        build(function, **SIZE, **asked)


def test_a_count_below_1_is_refused_before_the_function_is_called():
    with pytest.raises(ConfigError, match="ranks: 0 is below 1"):
        build(lambda ranks: 1 // 0, ranks=0, microbatches=1)


def short_on_rank_1(rank, ranks, microbatches):
    return phases(repeat(microbatches - (rank == 1), f(rank), b(rank)))


def test_a_function_that_takes_a_rank_is_called_for_each():
    def order(rank, ranks, microbatches, factor=1):
        warmup = min(microbatches, factor * (ranks - rank - 1))
        return phases(repeat(warmup, f(rank)), repeat(microbatches - warmup, f(rank), b(rank)), repeat(warmup, b(rank)))

    assert build(order, ranks=4, microbatches=6) == build("1f1b", ranks=4, microbatches=6)
    assert build(order, ranks=4, microbatches=6, factor=2) == build("1f1b", ranks=4, microbatches=6, warmup="eager")
    with pytest.raises(ConfigError, match="order has no option 'rank'; its options: factor, recompute"):
        build(order, **SIZE, rank=1)


@pytest.mark.parametrize("given", [True, "true", "1"])
def test_every_function_takes_the_options_of_every_family(given):
    seen = {}

    def note(ranks, microbatches, **options):
        seen.update(options)
        return all_forward_first(ranks, microbatches)

    for function in (all_forward_first, note):
        plain, again = build(function, **SIZE), build(function, **SIZE, recompute=given)
        expected = with_recompute(plain, activations=1 if given == "1" else None)
        assert (again, again.name) == (expected, plain.name)
        assert build(function, **SIZE, recompute=False) == plain
    assert seen == {}
    with pytest.raises(ConfigError, match="recompute: 'maybe' is not a value of it; choose false or true"):
        build(all_forward_first, **SIZE, recompute="maybe")


def test_a_function_that_names_an_option_of_every_family_gets_it_itself():
    def own(ranks, microbatches, recompute=False):
        assert recompute
        return all_forward_first(ranks, microbatches)

    assert build(own, **SIZE, recompute=True) == build(all_forward_first, **SIZE)


def test_a_microbatch_that_one_rank_never_runs_is_refused():
    told = r"short_on_rank_1: stage 1 runs 2 forwards of 3 microbatches; expected one each, so let the repeats"
    with pytest.raises(ScheduleError, match=told):
        build(short_on_rank_1, ranks=2, microbatches=3)
