"""Seconds that no order of a layout goes below, and bytes that its fullest rank holds at least.

    seconds    those of whole layers on the ranks (`bounds.whole_layers`), with the update of the weights as more work
    bytes      the mean over the ranks of what is always there; and of one layer, with what its backward needs

Both hold for every split, placement and order, and with stages that run again: so a layout whose bound lies above a
step that is known need not be looked at.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.lowering import OPTIMIZER
from penstock.searching.bounds import Bound
from penstock.searching.bounds.whole_layers import whole_layer_bound
from penstock.searching.layouts.problem import LayoutProblem
from penstock.simulation.costs.layer_costs import LayerCosts


@dataclass(frozen=True, slots=True)
class LayoutBound:
    """What a layout takes and holds at least."""

    seconds: float
    name: str
    """The bound that is the largest."""
    least_bytes: int

    def __lt__(self, other: "LayoutBound") -> bool:
        return self.seconds < other.seconds


def bound_of(problem: LayoutProblem) -> LayoutBound:
    """Return the bounds of a layout."""
    bound = least_seconds(problem)
    return LayoutBound(bound.seconds, bound.name, least_bytes(problem))


def least_seconds(problem: LayoutProblem) -> Bound:
    """Return the largest bound of the seconds of a step.

    A rank updates its weights behind its last backward: as if the W of each microbatch took its share of the update
    longer. With that, memory bounds nothing, since the bytes of a microbatch are not held for longer.
    """
    layout, costs = problem.layout, problem.resident_costs
    if not costs.backward_input:
        costs = replace(costs, backward_input=costs.backward, backward_weight=(0.0,), backward=())
    updates = problem.of_layers("optimizer") / layout.microbatches
    shape = (layout.pipeline, layout.microbatches)
    bounds = (
        whole_layer_bound(_with_updates(costs, updates), *shape),
        whole_layer_bound(costs, *shape, memory_limit=problem.limit_bytes if any(costs.activation_bytes) else None),
    )
    return max(bounds, key=lambda bound: bound.seconds)


def _with_updates(costs: LayerCosts, updates: np.ndarray[tuple[int], np.dtype[np.float64]]) -> LayerCosts:
    """Return costs whose backwards of weights, and whole backwards, take so many seconds longer by layer."""

    def longer(entries: tuple[float, ...]) -> tuple[float, ...]:
        return tuple((np.array(entries) + updates).tolist())

    backward = longer(costs.backward) if costs.backward else ()
    return replace(costs, backward_weight=longer(costs.backward_weight), backward=backward)


def least_bytes(problem: LayoutProblem) -> int:
    """Return the bytes that the fullest rank holds at least.

    A rank that runs stages again may keep next to nothing of other microbatches, but all of the layer whose backward
    it runs. Replicas that gather once a step have all weights of a rank whole in its last backward of a later stage;
    whole gradients of its stages may come and go one after the other.
    """
    static, weights = problem.static_bytes, problem.whole_weights
    always = static + weights if problem.layout.shard == OPTIMIZER else static
    layer = static + weights + np.maximum(problem.of_layers("activation_bytes"), problem.whole_gradients)
    layer += problem.of_layers("backward_workspace_bytes")
    return int(max(float(always.sum()) / problem.layout.pipeline, float(layer.max())))
