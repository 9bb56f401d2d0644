"""A result that anything known contradicts is a bug, and never an answer."""

from dataclasses import replace

import pytest

from penstock.cli import main
from penstock.placement import Placement
from penstock.planning import plan
from penstock.schedules import build
from penstock.searching import search as searching
from penstock.searching.bounds import Bound
from penstock.searching.certifying import certify
from penstock.searching.search import search
from penstock.simulation import Costs

COSTS = Costs.uniform(forward=1.0, backward_input=1.0, backward_weight=1.0)
RESULT = search(COSTS, 4, 8, evaluations=500)
SLOW = replace(RESULT, plan=plan(build("gpipe", ranks=4, microbatches=8), COSTS))


def certified(result, costs=COSTS, memory_limit=None):
    certify(result, {Placement.line(4): costs}, memory_limit, per_action=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"result": SLOW}, "which fits, takes"),
        ({"result": replace(RESULT, bound=Bound("work", 0, {"work": 27.5}))}, "lies above the result"),
        ({"result": RESULT, "costs": replace(COSTS, latency_s=0.1)}, "the search found 27.0 s, and its result takes"),
        ({"result": RESULT, "memory_limit": "1 microbatch"}, "does not fit 1 microbatch"),
        ({"result": SLOW, "memory_limit": "8 microbatches"}, "which fits, takes"),
    ],
)
def test_a_wrong_result_is_a_bug(given, words):
    with pytest.raises(AssertionError, match=words):
        certified(**given)


def test_a_family_that_does_not_fit_contradicts_nothing():
    limit = "2 microbatches"
    result = search(COSTS, 4, 8, memory_limit=limit, evaluations=2_000)

    certified(result, memory_limit=limit)
    with pytest.raises(AssertionError, match="which fits, takes"):
        certified(result)


def test_the_command_ends_with_the_status_of_a_bug_and_prints_no_result(monkeypatch, capsys):
    monkeypatch.setattr(searching, "best_result", lambda results: SLOW)

    assert main(["search", "--ranks", "4", "--microbatches", "8", "--seconds", "0"]) == 70
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "which fits, takes" in printed.err
