"""Units in keys: what they make of numbers, and what is said about keys that are none."""

import pytest

from penstock.errors import ConfigError
from penstock.simulation.costs.units import resolve_key

FIELDS = ("forward_s", "latency_s", "bandwidth_bytes_per_s", "message_bytes", "overlap_factor", "is_exclusive")


@pytest.mark.parametrize(
    ("key", "number", "field", "converted"),
    [
        ("forward_ms", 18.522, "forward_s", 0.018522),
        ("forward_us", 3, "forward_s", 3e-6),
        ("message_bytes", 7, "message_bytes", 7),
        ("message_kb", 1.5, "message_bytes", 1500),
        ("message_gb", 1.1, "message_bytes", 1_100_000_000),
        ("message_kib", 0.5, "message_bytes", 512),
        ("message_mib", 13.5, "message_bytes", 27 * 2**19),
        ("bandwidth_bytes_per_s", 5.0, "bandwidth_bytes_per_s", 5.0),
        ("bandwidth_gb_per_s", 25, "bandwidth_bytes_per_s", 25e9),
        ("bandwidth_gbit_per_s", 400, "bandwidth_bytes_per_s", 50e9),
        ("overlap_factor", 0.9, "overlap_factor", 0.9),
    ],
)
def test_a_number_becomes_seconds_bytes_or_bytes_per_second(key, number, field, converted):
    found, unit = resolve_key(key, FIELDS)

    assert found == field
    assert unit.convert(number) == pytest.approx(converted, rel=1e-15)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("forward_minutes", r"has no unit that is known; end it in one of s, ms, us"),
        ("message_words", r"has no unit .* one of bytes, kb, kib, mb, mib, gb, gib, tb, tib"),
        ("bandwidth_mbit", r"has no unit .* one of bytes_per_s, mb_per_s, gb_per_s, gib_per_s, gbit_per_s"),
        ("foward_ms", r"is no key here\. Did you mean 'forward_ms'"),
        ("is_exclusiv", r"is no key here\. Did you mean 'is_exclusive'\?"),
        ("colour", r"is no key here\. Known here: forward_s, latency_s, .*is_exclusive\.$"),
    ],
)
def test_a_key_that_is_none_is_refused_with_what_was_meant(key, told):
    with pytest.raises(ConfigError, match=rf"^channels\[0\]\.{key}: {told}"):
        resolve_key(key, FIELDS, "channels[0].")
