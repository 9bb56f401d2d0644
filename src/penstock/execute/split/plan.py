"""`SplitPlan`: how the backwards of a stage are split in one step, from what the graphs of earlier steps have shown.

    walks of I ──► `Shown` ──► before a step, if it has changed: `SplitPlan` ──► all forwards and backwards of the step

A step never changes its plan, so gradients add up in one order. A new one is made before a step for these reasons:

    a walk has come to a weight for the first time       its size is known, and whether others keep what it needs;
    (after the first step: to all of them)               the products of the latter are split in the forward then
    such a product was not split in the forward          every function is watched, not only torch's own layers;
                                                         if that does not show it either, its gradient stays in I
    a custom function has asked for the first time       it is run in two parts
    the batch is more than twice as large                sizes are looked at again
    a forward that was made for splitting has failed     nothing is split in the forward any more
    other parameters are trained, or were replaced       all of it is found out again, for these

Weight gradients that cannot wait are computed with the input gradients, as in a whole backward: the gradients and the
order of the schedule stay, and only what the split was to gain is lost.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from penstock.execute.split.graph_search import Survey
from penstock.execute.split.wanted import asks

Covers = Callable[[frozenset[int]], bool]
"""Says whether each of some weights is held by a layer of torch's own, which can be watched by itself."""
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the backwards of one step are split. Weights are given by the ids of their parameters."""

    sizes: Mapping[int, float] = field(default_factory=dict, compare=False)
    """Multiplications of a weight's gradients in one microbatch, as they were known when the plan was made."""
    small: frozenset[int] = _NONE
    """Weights whose gradients take less time than to defer them."""
    in_forward: frozenset[int] = _NONE
    """Weights whose products are split in the forward: others keep what W needs, such as checkpointing."""
    watches_all: bool = False
    """Whether every function is watched for these products, not only the layers that hold the weights."""
    asking: frozenset[Any] = frozenset()
    """Custom functions that are run in two parts."""
    finds_branches: bool = True
    """Whether what is made of weights alone is looked for: not once a walk has come to all weights and found none."""
    searches: bool = True
    """Whether graphs are walked at all: not where it is known that nothing can wait."""


@dataclass(slots=True)
class Shown:
    """All that walks through the graphs of a stage have shown, and batches and failures."""

    sizes: dict[int, float] = field(default_factory=dict)
    """As of the first walk that came to a weight."""
    is_measured: bool = False
    """Whether a walk has come to these weights, with batches of this size."""
    kept_elsewhere: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    """Weights whose products were not split though their layers were watched."""
    unsplittable: set[int] = field(default_factory=set)
    """Those that watching every function does not split either."""
    functions: set[Any] = field(default_factory=set)
    """Custom functions in the graphs of the latest step; a forward may make new ones of its own."""
    has_branches: bool = False
    has_failed: bool = False
    """Whether a forward that was made for splitting has failed."""

    def add(self, survey: Survey, plan: SplitPlan, seen: Set[int]) -> None:
        """Note what a walk has shown under a plan; `seen` are the weights that the forward split."""
        self.sizes = survey.sizes | self.sizes
        self.is_measured = True
        self.kept_elsewhere |= survey.kept_elsewhere
        not_split = self.unsplittable if plan.watches_all else self.missed
        not_split |= (survey.kept_elsewhere & plan.in_forward) - seen
        self.functions |= survey.functions
        self.has_branches |= any(each.is_entry for each in survey.waiting)

    def forget_others(self, held: Iterable[int]) -> None:
        """Forget the weights that are not held any more, and have walks look at others that are trained now."""
        weights = set(held)
        self.sizes = {key: size for key, size in self.sizes.items() if key in weights}
        self.is_measured = False
        for found in (self.kept_elsewhere, self.missed, self.unsplittable):
            found &= weights


def plan_from(shown: Shown, border: float, covers: Covers) -> SplitPlan:
    """Return the plan that follows; `border` is how many multiplications a gradient must take to wait."""
    small = frozenset(key for key, size in shown.sizes.items() if size < border)
    in_forward = _NONE if shown.has_failed else frozenset(shown.kept_elsewhere) - small - shown.unsplittable
    asking = frozenset(filter(asks, shown.functions))
    # Where nothing waits there is nothing left to be found, once that is seen to be so.
    is_all_known = shown.is_measured and (small | shown.kept_elsewhere).issuperset(shown.sizes)
    return SplitPlan(
        shown.sizes,
        small,
        in_forward,
        watches_all=not (shown.missed.isdisjoint(in_forward) and covers(in_forward)),
        asking=asking,
        finds_branches=shown.has_branches or not shown.is_measured or bool(asking),
        searches=not is_all_known or bool(in_forward or asking),
    )
