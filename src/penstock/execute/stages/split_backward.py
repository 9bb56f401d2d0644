"""Says once if much of a stage's weights get their gradients with those of its inputs, though the backward is split.

`SplitPlan` says which weight gradients wait. Those that cannot wait are computed with the input gradients, as in a
whole backward: the gradients and the order of the schedule stay, and only what the split was to gain is lost.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from penstock.errors import MAX_SHOWN, PenstockWarning
from penstock.execute.split.plan import SplitPlan

LARGE_SHARE = 0.1
"""Of the weights of a stage, how many must not have waited for the warning."""


class EarlyWeights:
    """Watches the first split backwards of a stage, until its split plan is settled."""

    def __init__(self) -> None:
        self.is_examined = False
        """Whether what cannot wait is known."""

    @contextmanager
    def watching(self, stage: int, parameters: Sequence[tuple[str, nn.Parameter]], plan: SplitPlan) -> Iterator[None]:
        """Look which weights get their gradients in a backward of inputs, and warn of them once the plan is settled."""
        matrices = {name: weight for name, weight in parameters if weight.requires_grad and weight.dim() > 1}
        early: set[str] = set()
        hooks = [
            weight.register_post_accumulate_grad_hook(lambda _, name=name: early.add(name))  # type: ignore[no-untyped-call]
            for name, weight in matrices.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if plan.is_settled:
            self.is_examined = True
            large = [name for name in matrices if name in early and not plan.is_small(matrices[name])]
            _warn_of(stage, large, matrices)


def _warn_of(stage: int, early: Sequence[str], matrices: Mapping[str, nn.Parameter]) -> None:
    num_early = sum(matrices[name].numel() for name in early)
    share = num_early / sum(weight.numel() for weight in matrices.values()) if matrices else 0.0
    if share <= LARGE_SHARE:
        return
    more = f" and {len(early) - MAX_SHOWN} more" if len(early) > MAX_SHOWN else ""
    warnings.warn(
        f"stage {stage}: {share:.0%} of its weights take their gradients in the input part of a split backward: "
        f"{', '.join(early[:MAX_SHOWN])}{more}. They are right, but leave the weight part less to do, which a schedule "
        "with split backwards lives on. Expected weights that are the right side of products, convolutions or tables "
        "alone, outside compiled and custom functions; or use a schedule with whole backwards",
        PenstockWarning,
        stacklevel=2,
    )
