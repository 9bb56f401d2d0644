"""The values that a cost may have."""

import math

import pytest

from penstock.errors import ConfigError
from penstock.simulation.costs.rules import require_cost, require_costs


@pytest.mark.parametrize("entry", [0, 0.0, 1, 2.5, True, 10**30])
def test_finite_numbers_of_0_or_more_are_costs(entry):
    require_cost(entry, "forward_s")


@pytest.mark.parametrize("entry", [-1, -0.001, math.nan, math.inf, -math.inf, -(10**400), "1", None, [1.0], (1.0,), 1j])
def test_anything_else_is_none(entry):
    with pytest.raises(
        ConfigError, match=r"^forward_s: .* is negative or not a number; costs are finite and 0 or more"
    ):
        require_cost(entry, "forward_s")


def test_a_number_that_no_float_can_hold_is_none():
    with pytest.raises(ConfigError, match=r"^forward_s: 10{36}\.\.\. is more than a number can hold; costs are finite"):
        require_cost(10**400, "forward_s")


def test_only_a_bandwidth_may_be_infinite_and_must_not_be_0():
    require_cost(math.inf, "channels.bandwidth_bytes_per_s")

    with pytest.raises(ConfigError, match="0 bytes per second never delivers; leave it out for an infinite one"):
        require_cost(0, "bandwidth_bytes_per_s")


def test_bytes_are_whole():
    require_cost(5.0, "message_bytes")

    with pytest.raises(ConfigError, match=r"^message_bytes: 5\.5 is not a whole number of bytes"):
        require_cost(5.5, "message_bytes")


def test_bytes_can_be_counted_in_64_bits():
    require_cost(2**56, "message_bytes")

    with pytest.raises(ConfigError, match=r"^message_bytes: 72057594037927952 bytes are more than 720.*; give fewer"):
        require_cost(2**56 + 16, "message_bytes")


def test_of_several_each_must_be_a_cost():
    require_costs((1, 2.0), "reduce_s")

    with pytest.raises(ConfigError, match="reduce_s: -2 is negative"):
        require_costs((1, -2), "reduce_s")


def test_only_what_may_be_unknown_may_be_empty():
    require_costs((), "backward_input_s", may_be_empty=True)

    with pytest.raises(ConfigError, match="reduce_s: is empty; give one number for each, or one for all"):
        require_costs((), "reduce_s")
