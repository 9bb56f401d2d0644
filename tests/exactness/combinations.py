"""Combinations of one value per axis: all that can be built, many, and few in which all pairs of values meet."""

import random
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import combinations, product

from penstock.errors import ConfigError
from penstock.schedules import FAMILIES, build
from tests.exactness.features import LOSSES, MODELS

MAX_RANKS = 4
MAX_MICROBATCHES = 8
MAX_SLICES = 3


@dataclass(frozen=True, order=True)
class Combination:
    """One point of the product."""

    family: str
    loss: str
    feature: str
    num_ranks: int
    num_microbatches: int

    def __str__(self):
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def schedule(self):
        return schedule_of(self.family, self.num_ranks, self.num_microbatches)

    @property
    def pairs(self):
        """Every two values that meet here."""
        return set(combinations(enumerate(astuple(self)), 2))


@cache
def schedule_of(name, num_ranks, num_microbatches):
    """Return the family's schedule, or None where it refuses the shape; stages and slices vary with the shape."""
    family = FAMILIES[name]
    shape = {"ranks": num_ranks, "microbatches": num_microbatches}
    if 0 in family.stages_per_rank:
        shape["stages_per_rank"] = 1 + (num_ranks + num_microbatches) % 3
    if family.takes_slices:
        shape["slices"] = 1 + num_microbatches % MAX_SLICES
    for chosen in (shape, {"ranks": num_ranks, "microbatches": num_microbatches}):
        try:
            return build(name, **chosen)
        except ConfigError:
            continue
    return None


def all_combinations():
    """Return the whole product, but for the shapes that a family refuses."""
    families = [name for name, family in FAMILIES.items() if name != "forward-only"]
    axes = (families, LOSSES, MODELS, range(1, MAX_RANKS + 1), range(1, MAX_MICROBATCHES + 1))
    return [found for values in product(*axes) if (found := Combination(*values)).schedule is not None]


def thorough(found):
    """Return every family, loss and feature on every number of ranks, each with a third of the microbatches in turn."""
    numbers, chosen = {}, []
    for each in found:
        numbers.setdefault((each.family, each.num_ranks), set()).add(each.num_microbatches)
    for each in found:
        own = sorted(numbers[each.family, each.num_ranks])
        turn = list(LOSSES).index(each.loss) + list(MODELS).index(each.feature)
        if own.index(each.num_microbatches) % 3 == turn % min(3, len(own)):
            chosen.append(each)
    return chosen


def covering(found):
    """Return few of these in which every pair of values that meets in any of them meets again; always the same."""
    chance = random.Random(0)
    missing = set().union(*(each.pairs for each in found))
    by_pair = {}
    for each in chance.sample(found, len(found)):
        for pair in each.pairs:
            by_pair.setdefault(pair, []).append(each)
    chosen = []
    # The pair that is hardest to meet first; of those it meets in, the one with most that is missing.
    for pair in sorted(missing, key=lambda pair: (len(by_pair[pair]), pair)):
        if pair in missing:
            best = max(by_pair[pair], key=lambda each: len(each.pairs & missing))
            chosen.append(best)
            missing -= best.pairs
    return sorted(chosen)
