"""Figures as text."""

import pytest

from penstock.show.text import (
    format_seconds,
)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0.00 s"),
        (1.234, "1.23 s"),
        (0.99996, "1.00 s"),
        (0.0123, "12.3 ms"),
        (45.6e-6, "45.6 µs"),
        (7e-9, "7.00 ns"),
        (1234.5, "1234 s"),
    ],
)
def test_seconds_have_three_digits_and_their_natural_unit(duration_s, text):
    assert format_seconds(duration_s) == text
