"""Runs the input part and the weight part of a backward apart.

`SplitPlan` says how they are parted. Weights that cannot be parted have their gradients computed in the input part, as
in a whole backward: the gradients and the order of the schedule stay, and only what the split was to gain is lost. If
that is much of a stage, and not because they are small, the stage says so once.
"""

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from penstock.errors import MAX_SHOWN, PenstockWarning
from penstock.execute.stages.stage import SavedForward, Stage

LARGE_SHARE = 0.1
"""Of the weights of a stage, what must have stayed in the input part to be spoken of."""


def backward_input(stage: Stage, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the stage's inputs, and keep of the forward only what `backward_weight` needs."""
    if stage.is_examined:
        return stage.backward_input(saved, gradients)
    matrices = {name: weight for name, weight in stage.named_parameters() if weight.requires_grad and weight.dim() > 1}
    early: set[str] = set()
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda _, name=name: early.add(name))  # type: ignore[no-untyped-call]
        for name, weight in matrices.items()
    ]
    try:
        results = stage.backward_input(saved, gradients)
    finally:
        for hook in hooks:
            hook.remove()
    if stage.split_plan.is_settled:
        stage.is_examined = True
        _tell_what_stayed(stage, [name for name in matrices if name in early], matrices)
    return results


def backward_weight(stage: Stage, saved: SavedForward) -> None:
    """Add the gradients of the stage's weights."""
    stage.backward_weight(saved)


def _tell_what_stayed(stage: Stage, early: Sequence[str], matrices: Mapping[str, nn.Parameter]) -> None:
    early = [name for name in early if not stage.split_plan.is_small(matrices[name])]
    num_early = sum(matrices[name].numel() for name in early)
    share = num_early / sum(weight.numel() for weight in matrices.values()) if matrices else 0.0
    if share <= LARGE_SHARE:
        return
    more = f" and {len(early) - MAX_SHOWN} more" if len(early) > MAX_SHOWN else ""
    warnings.warn(
        f"stage {stage.index}: {share:.0%} of its weights take their gradients in the input part of a split backward: "
        f"{', '.join(early[:MAX_SHOWN])}{more}. They are right, but leave the weight part less to do, which a schedule "
        "with split backwards lives on. Expected weights that are the right side of products, convolutions or tables "
        "alone, outside compiled and custom functions; or use a schedule with whole backwards",
        PenstockWarning,
        stacklevel=2,
    )
