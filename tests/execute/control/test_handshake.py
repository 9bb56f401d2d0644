"""What fails on one rank fails on all of them, at once."""

import time
from dataclasses import fields, replace

import pytest

from penstock.errors import ConfigError, PartitionError, PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import Agreed, Found, Setup, exchange, require_equal, together, told_of
from tests.local_pipelines import error_of, on_ranks


def test_every_rank_gets_its_own_result():
    assert on_ranks(3, lambda wires: together(Control(wires), lambda: wires.rank * 10)) == [0, 10, 20]


@pytest.mark.parametrize(
    ("error", "told"),
    [(PartitionError("planted"), "rank 1: planted"), (RuntimeError("planted"), "rank 1: RuntimeError: planted")],
    ids=["ours", "another"],
)
def test_an_error_of_one_rank_is_raised_there_as_it_is_and_told_on_the_others_at_once(error, told):
    def make(rank):
        if rank == 1:
            raise error

    begin_s = time.monotonic()

    def case(wires):
        return error_of(together, Control(wires), lambda: make(wires.rank))

    first, own, last = on_ranks(3, case, deadline_s=30.0)

    assert own is error
    assert [type(other) for other in (first, last)] == [ConfigError, ConfigError]
    assert str(first) == str(last) == told
    assert time.monotonic() - begin_s < 15.0


def test_an_error_without_a_text_is_told_by_its_type():
    def case(wires):
        return error_of(together, Control(wires), int if wires.rank else fails_silently)

    assert str(on_ranks(2, case)[1]) == "rank 0: KeyError: "


def fails_silently():
    raise KeyError


SETUP = Setup(**{field.name: "1" for field in fields(Setup)})


def test_what_one_rank_cannot_say_of_its_result_fails_on_all_ranks_too():
    def case(wires):
        return error_of(exchange, Control(wires), lambda: wires.rank, lambda rank: {"share": 1 / rank})

    own, other = on_ranks(2, case)

    assert (type(own), type(other), str(other)) == (
        ZeroDivisionError,
        ConfigError,
        "rank 0: ZeroDivisionError: division by zero",
    )


@pytest.mark.parametrize("name", [field.name for field in fields(Setup)])
def test_a_setup_that_differs_is_named_by_its_field_and_its_ranks_everywhere(name):
    def case(wires):
        setup = replace(SETUP, **{name: "1, 2"}) if wires.rank else SETUP
        _, everyone = exchange(Control(wires), lambda: None, lambda _: told_of(setup, Found()))
        return error_of(Agreed.of, everyone)

    for error in on_ranks(3, case):
        assert type(error) is PipelineError
        assert error.rank == 1
        assert f"disagree on {name}: rank 0 has 1, rank 1 has 1, 2 (and so do ranks 2)" in str(error)


def test_ranks_that_do_not_use_a_setting_are_not_compared_in_it():
    setups = [{"count": None}, {"count": "none"}, {"count": None}, {"count": "a function"}]

    require_equal([*setups[:3], {"count": "none"}])
    require_equal([{"count": None}] * 2)
    error = error_of(require_equal, setups)

    assert "disagree on count: rank 1 has none, rank 3 has a function." in str(error)
    assert error.rank == 3


def test_a_rank_of_another_version_that_says_other_things_is_told_so():
    old = {"setup": {"version": "0.1"}, "found": {"something": 3}}
    new = told_of(replace(SETUP, version="0.2"), Found())

    for everyone in ([old, new], [new, old]):
        assert "disagree on version" in str(error_of(Agreed.of, everyone))


def test_all_ranks_know_what_each_of_them_found():
    def case(wires):
        found = Found(
            keywords=["mask", "scale"][wires.rank :],
            skips={str(wires.rank): ["a"]},
            shared=[("0.weight", "1.weight")] if wires.rank else [],
            host=f"host {wires.rank}",
        )
        return Agreed.of(exchange(Control(wires), lambda: None, lambda _: told_of(SETUP, found))[1])

    first, second = on_ranks(2, case)

    assert first == second
    assert first.keywords == {"mask", "scale"}
    assert first.skips == {0: ["a"], 1: ["a"]}
    assert first.shared == [("0.weight", "1.weight")]
    assert first.each("host") == ["host 0", "host 1"]


def test_what_a_rank_says_less_or_more_differs():
    error = error_of(require_equal, [{"split": "1, 2"}, {}])

    assert "disagree on split: rank 0 has 1, 2, rank 1 has nothing" in str(error)
