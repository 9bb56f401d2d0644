"""Seconds that no order of a layout goes below, and bytes that its fullest rank holds at least.

    work       the mean over the ranks: their work, and the least that later ones wait for their first microbatch
    layer      the rank of one layer computes it for every microbatch, behind all layers before it
    bytes      the mean over the ranks of what is always there; and of one layer, with what its backward needs

Both hold for every split, placement and order, and with stages that run again: so a layout whose bound lies above a
step that is known need not be looked at.
"""

from dataclasses import dataclass

import numpy as np

from penstock.lowering import OPTIMIZER
from penstock.searching.layouts.problem import LayoutProblem


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
    seconds, name = max((work_s(problem), "work"), (layer_s(problem), "one layer"))
    return LayoutBound(seconds, name, least_bytes(problem))


def work_s(problem: LayoutProblem) -> float:
    """Return the mean seconds of a rank: its work, its update, and what it waits for its first microbatch.

    The rank that begins as number k waits for the forwards of k layers at least.
    """
    layout = problem.layout
    forward = problem.of_layers("forward")
    waits_s = float(np.cumsum(forward)[: layout.pipeline - 1].sum())
    work = layout.microbatches * float(problem.seconds.sum()) + float(problem.of_layers("optimizer").sum())
    return (work + waits_s) / layout.pipeline


def layer_s(problem: LayoutProblem) -> float:
    """Return the most that one layer takes: its work for every microbatch, behind the forwards of those before it."""
    forward = problem.of_layers("forward")
    behind_s = np.cumsum(forward) - forward
    return float((behind_s + problem.layout.microbatches * problem.seconds).max())


def least_bytes(problem: LayoutProblem) -> int:
    """Return the bytes that the fullest rank holds at least.

    A rank that runs stages again may keep next to nothing of other microbatches, but all of the layer whose backward
    it runs. Replicas that gather once a step have all weights of a rank whole in its last backward of a later stage;
    whole gradients of its stages may come and go one after the other.
    """
    static, weights = problem.static_bytes, problem.whole_weights
    always = static + weights if problem.layout.shard == OPTIMIZER else static
    layer = static + weights + np.maximum(problem.of_layers("activation_bytes"), problem.whole_gradients)
    return int(max(float(always.sum()) / problem.layout.pipeline, float(layer.max())))
