"""The most seconds of work whose bytes fit into a room."""

from itertools import accumulate

Kinds = list[tuple[int, float, int]]
"""The bytes of one piece of work, its seconds, and how many pieces of the kind there are."""


def most_seconds(kinds: Kinds, room: int) -> float:
    """Return at least the most seconds of pieces that fit into a room.

    With at most two sizes it is exact: whole pieces are counted. With more, the last piece is cut.
    """
    kinds = [kind for kind in kinds if kind[1] > 0 and kind[2] > 0]
    if room < 0 or not kinds:
        return 0.0
    if sum(size * count for size, _, count in kinds) <= room:
        return sum(seconds * count for _, seconds, count in kinds)
    free = sum(seconds * count for size, seconds, count in kinds if not size)
    kinds = [kind for kind in kinds if kind[0]]
    sizes = sorted({size for size, *_ in kinds})
    if len(sizes) > 2:
        return free + _cut(kinds, room)
    small, big = sizes[0], sizes[-1]
    big_kinds, small_kinds = ([kind for kind in kinds if kind[0] == size] for size in (big, small))
    if small == big:
        return free + _best_of(big_kinds, room // big)[-1]
    best_of_small = _best_of(small_kinds, room // small)
    return free + max(
        seconds + best_of_small[min((room - num_big * big) // small, len(best_of_small) - 1)]
        for num_big, seconds in enumerate(_best_of(big_kinds, room // big))
    )


def _best_of(kinds: Kinds, most: int) -> list[float]:
    """Return the most seconds of 0, 1, ... pieces, of no more than `most` pieces."""
    seconds_of_pieces = [seconds for _, seconds, count in kinds for _ in range(min(count, most))]
    return list(accumulate(sorted(seconds_of_pieces, reverse=True)[:most], initial=0.0))


def _cut(kinds: Kinds, room: int) -> float:
    """Return the most seconds of pieces that fit into a room where the last one may be cut."""
    total, free_bytes = 0.0, float(room)
    for size, seconds, count in sorted(kinds, key=lambda kind: kind[1] / kind[0], reverse=True):
        num_pieces = min(count, free_bytes / size)
        total += num_pieces * seconds
        free_bytes -= num_pieces * size
    return total
