"""Reduces the gradients of layers in `fully_shard` (FSDP2) once per step and stage.

    fully_shard alone    every backward reduces, and adds this rank's rows to the gradients of the shards
    here                 backwards add to whole gradients; the last backward of a stage reduces their sum

The last backward may pass a module by, since a layer may leave it out. What such a module has added up is reduced at
REDUCE_GRAD. So the gradients of the shards are complete behind every step, also within `no_sync()`. Torch could keep
whole gradients from step to step, but no `zero_grad()` would drop them.

Ranks tell exchanges apart by their order alone. So a stage with such modules runs the backward of every microbatch,
also of one that weighs nothing here, which on the other ranks may weigh something (stages/passes.py).

A sum of many microbatches in low precision loses what is small against it. So a module whose whole gradients have less
precision than the gradients of its shards reduces in every backward, as with `fully_shard` alone. This is so with
`MixedPrecisionPolicy(param_dtype=torch.bfloat16)` unless `reduce_dtype` is float32, and then in the first step alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.execute.parameters.gradient_store import GradientStore, WeightEntry, drop_gradients
from penstock.execute.parameters.layout import Launched, ParameterLayout
from penstock.execute.undocumented_modules import (
    drop_unreduced_sums,
    end_reduction,
    forget_iteration,
    gradient_sync,
    may_leave_unreduced,
    set_gradient_sync,
    summed_types,
    unreduced_sums,
    unsharded_parameters,
)


@dataclass(eq=False)
class FullySharded(ParameterLayout):
    """Parameters of which some are in modules of `fully_shard`, over whose ranks torch reduces their gradients."""

    reduces_in_backward = True

    _modules: Mapping[int, Sequence[Any]]
    """Modules of `fully_shard` by stage."""
    _gradients: GradientStore
    _others: ParameterLayout
    """The layout of the other parameters."""
    _sync_of_module: dict[nn.Module, tuple[bool, bool]] = field(default_factory=dict)
    """The caller's settings of the modules that reduce once in this step; empty between steps."""
    _is_training: bool = False
    """Whether the step that was begun last trains."""

    def held(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        parameters, gradients = self._others.held()
        unreduced_gradients = [
            gradient
            for module in self._all_modules()
            for gradient in (*(param.grad for param in unsharded_parameters(module)), *unreduced_sums(module))
            if gradient is not None
        ]
        return parameters, [*gradients, *unreduced_gradients]

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None:
        """Let backwards add up, and none of them reduce."""
        self._others.begin_step(is_synced=is_synced, sums_tied=sums_tied, is_training=is_training)
        self._is_training = is_training
        if is_training:
            # The caller may have set modules not to reduce, in a step whose gradients another one reduces.
            self._sync_of_module = {
                module: gradient_sync(module)
                for module in self._all_modules()
                if may_leave_unreduced(module) and self._adds_up_in_full(module)
            }
            self._set_sync(self._sync_of_module, is_last=False)

    def begin_last_backward(self, stage: int) -> None:
        """Let torch reduce as the backward goes, so that reductions run beside the rest of it."""
        self._set_sync(self._modules[stage], is_last=True)

    def reduce(self, stage: int, *, is_last: bool) -> Launched | None:
        """Reduce what the last backward of a stage has left in modules that it passed by."""
        for module in self._modules[stage]:
            end_reduction(module)
        return self._others.reduce(stage, is_last=is_last)

    def end_step(self) -> None:
        self._set_sync(self._sync_of_module, is_last=True)
        self._sync_of_module = {}
        self._others.end_step()

    def end_failed_step(self) -> None:
        """Drop the whole gradients, which a caller's `zero_grad()` does not reach; an evaluation leaves them."""
        for module in self._all_modules():
            forget_iteration(module)
            if self._is_training:
                drop_gradients(unsharded_parameters(module))
                drop_unreduced_sums(module)
        self._others.end_failed_step()

    def _all_modules(self) -> Iterable[Any]:
        return dict.fromkeys(chain.from_iterable(self._modules.values()))

    def _adds_up_in_full(self, module: nn.Module) -> bool:
        """Whether sums of a module's whole gradients have the precision that gradients of its shards have."""
        return all(
            torch.promote_types(summed_type, self._gradients.like(shard).dtype) == summed_type
            for shard, summed_type in summed_types(module)
        )

    def _set_sync(self, modules: Iterable[Any], *, is_last: bool) -> None:
        """Let backwards reduce as the caller has set it if `is_last`, else not at all."""
        for module in modules:
            if module in self._sync_of_module:
                reduces, reduces_copies = self._sync_of_module[module]
                set_gradient_sync(module, reduces=is_last and reduces, reduces_copies=is_last and reduces_copies)


class WholeGradientStore(GradientStore):
    """The gradients of a unit with modules of `fully_shard`: those of whole parameters outlive a backward, too."""

    def __init__(
        self, parameters: Callable[[], Iterable[nn.Parameter]], attribute: str, modules: Sequence[Any]
    ) -> None:
        super().__init__(parameters, attribute)
        self._modules = modules

    def end_backward(
        self, leaves: Sequence[Tensor], needed_tensors: Sequence[Tensor], entries: Sequence[WeightEntry] = ()
    ) -> None:
        """Give first gradients memory of their own, also those of whole parameters, to which later ones are added."""
        whole_params = chain.from_iterable(map(unsharded_parameters, self._modules))
        super().end_backward([*leaves, *whole_params], needed_tensors, entries)
