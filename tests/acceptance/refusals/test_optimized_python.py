"""Wrong calls are refused by errors with a text, in an optimized Python too, which runs no assert statement."""

import json
import subprocess
import sys

import pytest

from tests.house.source import ROOT
from tests.support.refused_calls import WRONG_CALLS, outcome_of


def assert_refused(name, outcome):
    kinds, text = outcome
    assert WRONG_CALLS[name].kind in kinds, text
    assert [part for part in WRONG_CALLS[name].texts if part not in text] == [], text


@pytest.mark.feature("H12")
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused(name):
    assert_refused(name, outcome_of(name))


@pytest.mark.feature("H12")
@pytest.mark.slow
@pytest.mark.parametrize("option", ["-O", pytest.param("-OO", marks=pytest.mark.full)])
def test_wrong_calls_are_refused_in_an_optimized_python(option):
    command = [sys.executable, option, "-m", "tests.support.refused_calls"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout

    answer = json.loads(printed)
    assert answer["optimized"]
    assert answer["outcomes"].keys() == WRONG_CALLS.keys()
    for name, outcome in answer["outcomes"].items():
        assert_refused(name, outcome)
