"""Units of bytes, as memory limits and files with costs name them."""

BYTES_OF_UNIT = {"bytes": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for end, base in (("b", 1000), ("ib", 1024))
}
"""In small letters: 1 of `mb` is 10**6 bytes, 1 of `mib` is 2**20."""
