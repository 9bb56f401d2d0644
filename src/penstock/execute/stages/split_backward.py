"""Runs the two parts of a split backward: the input gradient (I) and the weight gradient (W).

`SplitPlan` says which weight gradients are deferred. The others are computed in I, as in a whole backward: the
gradients and the order of the schedule stay, and only what the split was to gain is lost. If that is much of a stage,
and not because the weights are small, the stage says so once.
"""

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from penstock.errors import MAX_SHOWN, PenstockWarning
from penstock.execute.stages.stage import SavedForward, Stage

LARGE_SHARE = 0.1
"""Of the weights of a stage, how much must not be deferred for a warning."""


def backward_input(stage: Stage, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the stage's inputs, and keep of the forward only what `backward_weight` needs."""
    if stage.is_examined:
        return stage.backward_input(saved, gradients)
    matrices = {name: weight for name, weight in stage.named_parameters() if weight.requires_grad and weight.dim() > 1}
    immediate: set[str] = set()
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda _, name=name: immediate.add(name))  # type: ignore[no-untyped-call]
        for name, weight in matrices.items()
    ]
    try:
        results = stage.backward_input(saved, gradients)
    finally:
        for hook in hooks:
            hook.remove()
    if stage.split_plan.is_settled:
        stage.is_examined = True
        _warn_of_immediate(stage, [name for name in matrices if name in immediate], matrices)
    return results


def backward_weight(stage: Stage, saved: SavedForward) -> None:
    """Add the gradients of the stage's weights."""
    stage.backward_weight(saved)


def _warn_of_immediate(stage: Stage, immediate: Sequence[str], matrices: Mapping[str, nn.Parameter]) -> None:
    immediate = [name for name in immediate if not stage.split_plan.is_small(matrices[name])]
    num_immediate = sum(matrices[name].numel() for name in immediate)
    share = num_immediate / sum(weight.numel() for weight in matrices.values()) if matrices else 0.0
    if share <= LARGE_SHARE:
        return
    more = f" and {len(immediate) - MAX_SHOWN} more" if len(immediate) > MAX_SHOWN else ""
    warnings.warn(
        f"stage {stage.index}: the gradients of {share:.0%} of its weights are computed in I of a split backward: "
        f"{', '.join(immediate[:MAX_SHOWN])}{more}. They are right, but W, with which the schedule fills its bubbles, "
        "has less to do. Expected weights that are the right side of matrix products, convolutions or table look-ups "
        "alone, outside compiled and custom functions; or use a schedule with whole backwards",
        PenstockWarning,
        stacklevel=2,
    )
