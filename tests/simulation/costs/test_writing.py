"""Written costs read back as the same costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.action import Kind
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import Channel, Spread
from penstock.simulation.costs.file import costs_from_toml
from penstock.simulation.costs.writing import costs_to_toml
from tests.simulation.events import programs, uneven_costs

MEASURED = Costs(
    forward_s=(0.1, 1 / 3),
    backward_s=(2.0,),
    is_exclusive=True,
    channels=(Channel(1, 0, bandwidth_bytes_per_s=25e9), Channel(0, 1, 1e-5, math.inf, True)),
    message_bytes=(2**40,),
    spreads=(Spread(Kind.FORWARD, 0, 0.1, 0.01), Spread(Kind.BACKWARD_WEIGHT, 1, 1 / 7, 0.0)),
    source="a run\nof mine",
)


@given(programs(), st.integers(0, 2**32))
def test_costs_read_back_as_they_were(program, seed):
    costs = uneven_costs(program, seed)

    assert costs_from_toml(costs_to_toml(costs)) == costs


LAYERS = LayerCosts(
    split=[1, 1], forward=[1.0, 2.0], recompute=0.5, activation_bytes=[3, 4], launch_s=1.0, source="a profile"
)


@pytest.mark.parametrize(
    "costs", [Costs(), Costs.uniform(), MEASURED, LAYERS], ids=["unknown", "uniform", "measured", "layers"]
)
def test_whatever_is_known_is_written(costs):
    assert costs_from_toml(costs_to_toml(costs)) == costs


def test_toml_has_a_line_per_cost_that_differs_from_its_default():
    assert costs_to_toml(LAYERS) == (
        '# a profile\nper = "layer"\nsplit = [1, 1]\nforward_s = [1.0, 2.0]\nrecompute_s = 0.5\nlaunch_s = 1.0\n'
        "activation_bytes = [3, 4]\n"
    )
    assert costs_to_toml(MEASURED) == (
        "# a run of mine\n"
        "forward_s = [0.1, 0.3333333333333333]\n"
        "backward_s = 2.0\n"
        "is_exclusive = true\n"
        "message_bytes = 1099511627776\n"
        "\n[[channels]]\nsender = 1\nreceiver = 0\nbandwidth_bytes_per_s = 25000000000.0\n"
        "\n[[channels]]\nsender = 0\nreceiver = 1\nlatency_s = 1e-05\nis_exclusive = true\n"
        '\n[[spreads]]\nkind = "F"\nstage = 0\nmedian_s = 0.1\nquartile_range_s = 0.01\n'
        '\n[[spreads]]\nkind = "W"\nstage = 1\nmedian_s = 0.14285714285714285\nquartile_range_s = 0.0\n'
    )
