"""Memory limits and files with costs know the same units of bytes, and sizes are shown in the natural one."""

import pytest

from penstock.ir.units import BYTES_OF_UNIT, byte_unit, format_bytes
from penstock.proofs.memory import UNITS as UNITS_OF_LIMITS
from penstock.simulation.costs.units import UNITS as UNITS_OF_KEYS


@pytest.mark.parametrize(
    ("unit", "num_bytes"), [("bytes", 1), ("kb", 10**3), ("gb", 10**9), ("tb", 10**12), ("mib", 2**20), ("tib", 2**40)]
)
def test_a_unit_has_the_same_bytes_in_limits_and_in_keys(unit, num_bytes):
    assert BYTES_OF_UNIT[unit] == UNITS_OF_LIMITS[unit] == UNITS_OF_KEYS["bytes"][unit].convert(1) == num_bytes


def test_limits_and_keys_know_every_unit():
    assert UNITS_OF_KEYS["bytes"].keys() == BYTES_OF_UNIT.keys() == UNITS_OF_LIMITS.keys() - {"b"}


@pytest.mark.parametrize(("size", "text"), [(512, "512 B"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB")])
def test_bytes_have_three_digits_and_their_natural_unit(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(("size", "unit"), [(0, (1, "B")), (1023, (1, "B")), (2**40, (2**40, "TiB"))])
def test_the_unit_of_a_size_is_the_largest_that_is_not_above_it(size, unit):
    assert byte_unit(size) == unit
