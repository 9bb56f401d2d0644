"""Figures as plain text, with their units."""

from penstock.errors import count_of as count_of
from penstock.ir.units import byte_unit as byte_unit
from penstock.ir.units import format_bytes as format_bytes
from penstock.ir.units import three_digits

TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def time_unit(duration_s: float) -> tuple[float, str]:
    """Return the seconds and the name of the largest unit that is not above the duration."""
    size = abs(duration_s)
    if size == 0.0:
        return TIME_UNITS[0]
    # Rounding to three digits may lift 999.96 ms to 1 s, hence not exactly 1.
    return next((unit for unit in TIME_UNITS if size >= 0.9995 * unit[0]), TIME_UNITS[-1])


def format_seconds(duration_s: float) -> str:
    """Return a duration in three digits and its natural unit: `1.23 ms`, `45.6 µs`, `2.00 s`; whole above 1,000 s."""
    unit_s, name = time_unit(duration_s)
    return f"{three_digits(duration_s / unit_s)} {name}"


def format_share(share: float) -> str:
    """Return a fraction as a percentage: `12.5 %`."""
    return f"{100 * share:.1f} %"
