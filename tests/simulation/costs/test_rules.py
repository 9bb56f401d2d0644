"""The values that a cost may have."""

import math

import pytest

from penstock.errors import ConfigError
from penstock.simulation import Costs
from penstock.simulation.costs.rules import require_cost


@pytest.mark.parametrize("entry", [0, 0.0, 1, 2.5, True, 10**30])
def test_finite_numbers_of_0_or_more_are_costs(entry):
    require_cost(entry, "forward_s")


@pytest.mark.parametrize(
    ("entry", "key"), [(math.inf, "channels.bandwidth_bytes_per_s"), (5.0, "message_bytes"), (2**56, "message_bytes")]
)
def test_a_bandwidth_may_be_infinite_and_bytes_are_whole_as_far_as_64_bits_count(entry, key):
    require_cost(entry, key)


WRONG = [-1, -0.001, math.nan, math.inf, -math.inf, -(10**400), "1", None, [1.0], (1.0,), 1j]


@pytest.mark.parametrize(
    ("entry", "key", "told"),
    [
        *((each, "forward_s", ".* is negative or not a number; costs are finite and 0 or more") for each in WRONG),
        (10**400, "forward_s", r"10{36}\.\.\. is more than a number can hold; costs are finite"),
        (0, "bandwidth_bytes_per_s", "0 bytes per second never delivers; leave it out for an infinite one"),
        (5.5, "message_bytes", r"5\.5 is not a whole number of bytes"),
        (2**56 + 16, "message_bytes", "72057594037927952 bytes are more than 720.*; give fewer"),
    ],
)
def test_anything_else_is_none(entry, key, told):
    with pytest.raises(ConfigError, match=f"^{key}: {told}"):
        require_cost(entry, key)


@pytest.mark.parametrize("entries", [(1.1, 0.9), (1.0,), (), (0.9, 1.0, 1.1)])
def test_a_range_that_is_no_least_and_most_is_refused(entries):
    with pytest.raises(ConfigError, match=r"^seconds_range: "):
        Costs(seconds_range=entries)
