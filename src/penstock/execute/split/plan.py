"""`SplitPlan`: how the backwards of a stage are split in one step, from what the graphs of earlier steps have shown.

    walks of I ──► `Shown` ──► before a step, if it has changed: `SplitPlan` ──► all forwards and backwards of the step

A step never changes its plan, so gradients add up in one order. A new one is made before a step for these reasons:

    a walk has come to a weight for the first time,      its size is known; small ones are computed in I
    as in the first step to all of them
    a custom function has asked for the first time       it is run in two parts
    the batch is more than twice as large                sizes are looked at again
    other parameters are trained, or were replaced       all of it is found out again, for these

Weight gradients that cannot wait are computed with the input gradients, as in a whole backward: the gradients and the
order of the schedule stay, and only what the split was to gain is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.execute.split.graph_search import Survey
from penstock.execute.split.wanted import asks


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the backwards of one step are split. Weights are given by the ids of their parameters."""

    small: frozenset[int] = frozenset()
    """Weights whose gradients take less time than to defer them."""
    asking: frozenset[Any] = frozenset()
    """Custom functions that are run in two parts."""
    finds_branches: bool = True
    """Whether what is made of weights alone is looked for: not once a walk has come to all weights and found none."""
    searches: bool = True
    """Whether graphs are walked at all: not where it is known that nothing can wait."""


@dataclass(slots=True)
class Shown:
    """All that walks through the graphs of a stage have shown."""

    sizes: dict[int, float] = field(default_factory=dict)
    """Multiplications of a weight's gradients in one microbatch, as of the first walk that came to the weight."""
    is_measured: bool = False
    """Whether a walk has come to these weights, with batches of this size."""
    functions: set[Any] = field(default_factory=set)
    """Custom functions in the graphs of the latest step; a forward may make new ones of its own."""
    has_branches: bool = False

    def add(self, survey: Survey) -> None:
        """Note what a walk has shown."""
        self.sizes = survey.sizes | self.sizes
        self.is_measured = True
        self.functions |= survey.functions
        self.has_branches |= any(deferred_node.is_branch_entry for deferred_node in survey.deferred_nodes)

    def forget_others(self, parameter_ids: Iterable[int]) -> None:
        """Forget the weights that are not held any more, and have walks look at others that are trained now."""
        weight_ids = set(parameter_ids)
        self.sizes = {weight_id: size for weight_id, size in self.sizes.items() if weight_id in weight_ids}
        self.is_measured = False


def plan_from(shown: Shown, border: float) -> SplitPlan:
    """Return the plan that follows; `border` is how many multiplications a gradient must take to wait."""
    small = frozenset(weight_id for weight_id, size in shown.sizes.items() if size < border)
    asking = frozenset(filter(asks, shown.functions))
    return SplitPlan(
        small,
        asking,
        # Where nothing waits there is nothing left to be found, once that is seen to be so.
        finds_branches=shown.has_branches or not shown.is_measured or bool(asking),
        searches=not shown.is_measured or not small.issuperset(shown.sizes) or bool(asking),
    )
