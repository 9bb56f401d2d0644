"""Splits of layers, to try all of them."""

from itertools import combinations, pairwise


def every_split(num_layers, num_parts):
    """Yield the numbers of layers of consecutive parts, none of which is empty, in every way."""
    for cuts in combinations(range(1, num_layers), num_parts - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))
