"""A seeded shuffle of any size that answers for one place in constant time and memory.

A balanced Feistel network permutes the numbers below a power of four, whatever its round function does; numbers that
fall outside the wanted size are sent through it again until they fall inside (cycle walking; Black and Rogaway, 2002).
The power of four is less than four times the size, so that takes fewer than four passes on average.
"""

NUM_ROUNDS = 6
WORD_MASK = (1 << 64) - 1


def permuted(index: int, size: int, *, seed: int) -> int:
    """Return where a shuffle of `range(size)` puts `index`; each seed gives another shuffle.

    Raises:
        IndexError: the index is not in `range(size)`.
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} is not in range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [_mix(seed * NUM_ROUNDS + turn) for turn in range(NUM_ROUNDS)]
    while True:
        index = _feistel(index, half_bits, keys)
        if index < size:
            return index


def _feistel(value: int, half_bits: int, keys: list[int]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(value: int) -> int:
    """Spread every input bit over the 64 output bits (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & WORD_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return value ^ (value >> 31)
