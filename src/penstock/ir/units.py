"""Units of bytes, as memory limits and files with costs name them, and as they are shown to people."""

BYTES_OF_UNIT = {"bytes": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for end, base in (("b", 1000), ("ib", 1024))
}
"""In small letters: 1 of `mb` is 10**6 bytes, 1 of `mib` is 2**20."""
BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_bytes(size_bytes: int) -> str:
    """Return a size in three digits and its natural unit: `512 B`, `1.50 MiB`."""
    unit_bytes, name = byte_unit(size_bytes)
    return f"{size_bytes} B" if unit_bytes == 1 else f"{three_digits(size_bytes / unit_bytes)} {name}"


def byte_unit(size_bytes: int) -> tuple[int, str]:
    """Return the bytes and the name of the largest unit that is not above the size."""
    return next((unit for unit in BYTE_UNITS if abs(size_bytes) >= 0.9995 * unit[0]), (1, "B"))


def three_digits(value: float) -> str:
    """Return a number below 1,000 in three digits; larger ones whole."""
    size = abs(value)
    if size < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
