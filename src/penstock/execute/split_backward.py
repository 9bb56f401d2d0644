"""Runs the input part and the weight part of a backward apart.

Where a stage cannot be split, its input part runs the whole backward and its weight part nothing: the schedule keeps
its order and its gradients, and loses only what the split was to gain. No module is split yet.
"""

from collections.abc import Sequence

from torch import Tensor

from penstock.execute.stage import SavedForward, Stage


def backward_input(stage: Stage, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the stage's inputs; here the gradients of its weights are added too."""
    return stage.backward(saved, gradients)


def backward_weight(stage: Stage, saved: SavedForward) -> None:
    """Add the gradients of the stage's weights; here `backward_input` has done so."""
