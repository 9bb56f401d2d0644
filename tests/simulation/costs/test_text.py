"""Costs written in a line, as `--costs` takes them."""

import pytest

from penstock.errors import ConfigError
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.costs.text import EXAMPLE, costs_from_text

COSTS = Costs.uniform(forward=1, backward_input=2, backward_weight=3)


@pytest.mark.parametrize("text", ["F=1,I=2,W=3", " W = 3 , F=1.0,I=2e0", "F=1,I=2,W=3,B=5,transfer=0,overlap=1"])
def test_a_whole_backward_is_the_sum_of_its_parts_unless_given(text):
    assert costs_from_text(text).durations_s(2).tolist() == COSTS.durations_s(2).tolist()


def test_every_key_has_its_place():
    assert costs_from_text("F=1,I=0,W=.5,B=4,transfer=.25,overlap=0.75") == Costs.uniform(
        forward=1, backward_input=0, backward_weight=0.5, backward=4, transfer=0.25, overlap_factor=0.75
    )


def test_without_parts_of_a_backward_only_whole_ones_have_costs():
    costs = costs_from_text("F=1,B=2")

    assert simulate(lower(build("gpipe", ranks=1, microbatches=2)), costs).makespan_s == 6
    with pytest.raises(ConfigError, match="backward_input_s"):
        simulate(lower(build("zb-h1", ranks=1, microbatches=2)), costs)


def test_the_example_is_one():
    assert costs_from_text(EXAMPLE).latency_s == 0.1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "costs: '' is not of the form key=value; expected such as F=1"),
        ("F=1,I", "costs: 'I' is not of the form key=value"),
        (
            "F=1,I=1,W=1,tranfer=1",
            r"no cost 'tranfer'; known: F, B, I, W, R, transfer, overlap, unshard, reduce\. Did you mean 'transfer'\?",
        ),
        ("f=1,I=1,W=1", r"no cost 'f'; known: .* Did you mean 'F'\?"),
        ("X=1", "no cost 'X'; known: F, B, I, W, R, transfer, overlap"),
        ("F=1,I=1,W=1,F=2", "costs: F is given twice; keep one"),
        ("I=1,W=1", "costs: F missing; give F, and I and W or at least B, such as F=1"),
        ("F=1", "costs: I and W missing; give F, and I and W or at least B"),
        ("F=1,B=2,W=1", "costs: I missing"),
        ("transfer=1", "costs: F and I and W missing"),
        ("F=-1,I=1,W=1", "costs: F is '-1'; give a finite number of 0 or more"),
        ("F=1,I=nan,W=1", "costs: I is 'nan'; give a finite"),
        ("F=1,I=1,W=inf", "costs: W is 'inf'; give a finite"),
        ("F=1,I=1,W=one", "costs: W is 'one'; give a finite"),
        ("F=1,I=1,W=", "costs: W is ''; give a finite"),
    ],
)
def test_what_are_no_costs_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        costs_from_text(text)
