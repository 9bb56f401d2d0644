"""What the ranks of a pipeline say of themselves, and how it is compared."""

import pytest

from penstock.errors import PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import (
    SAME_START,
    SETTING_RULES,
    AgreedFacts,
    LocalFacts,
    require_equal,
    setup_report,
)
from tests.support.local_pipelines import error_of, on_ranks

SETUP = dict.fromkeys(["version", "schedule", "layers", "device", "shard"], "1")


@pytest.mark.parametrize("name", SETUP)
def test_a_setup_that_differs_is_named_by_its_field_and_its_ranks_everywhere(name):
    def case(wires):
        setup = SETUP | {name: "1, 2"} if wires.rank in (1, 3) else SETUP
        everyone = Control(wires).together(lambda: setup_report(setup, LocalFacts()))
        return error_of(AgreedFacts.of, everyone)

    for error in on_ranks(5, case):
        assert type(error) is PipelineError
        assert error.rank == 1
        assert f"disagree on {name}: rank 0 has 1, rank 1 has 1, 2 (and so do ranks 3). " in str(error)
        assert str(error).endswith(SETTING_RULES.get(name, SAME_START).fix)


def test_ranks_that_do_not_use_a_setting_are_not_compared_in_it():
    setups = [{"count": None}, {"count": "none"}, {"count": None}, {"count": "a function"}]

    require_equal([*setups[:3], {"count": "none"}])
    require_equal([{"count": None}] * 2)
    error = error_of(require_equal, setups)

    assert "disagree on count: rank 1 has none, rank 3 has a function." in str(error)
    assert error.rank == 3
    less = error_of(require_equal, [{"split": "1, 2"}, {}])
    assert "disagree on split: rank 0 has 1, 2, rank 1 has nothing" in str(less)


def test_a_rank_of_another_version_that_says_other_things_is_told_so():
    old = {"setup": {"version": "0.1"}, "found": {"something": 3}}
    new = setup_report(SETUP | {"version": "0.2"}, LocalFacts())

    for everyone in ([old, new], [new, old]):
        assert "disagree on version" in str(error_of(AgreedFacts.of, everyone))


def test_all_ranks_know_what_each_of_them_found():
    def case(wires):
        found = LocalFacts(
            keywords=["mask", "scale"][wires.rank :],
            skips={str(wires.rank): ["a"]},
            shared=[("0.weight", "1.weight")] if wires.rank else [],
            host=f"host {wires.rank}",
        )
        return AgreedFacts.of(Control(wires).together(lambda: setup_report(SETUP, found)))

    first, second = on_ranks(2, case)

    assert first == second
    assert first.keywords == {"mask", "scale"}
    assert first.skips == {0: ["a"], 1: ["a"]}
    assert first.shared == [("0.weight", "1.weight")]
    assert first.each("host") == ["host 0", "host 1"]
