"""Averages the gradients of layers in DistributedDataParallel (DDP), once per step and stage.

    DDP alone    forward arms the reducer; the next backward of any microbatch reduces, later ones only accumulate
    here         a step runs under `no_sync()`; gradients are averaged at REDUCE_GRADIENT, behind the last backward

Averages are linear, and the average of equal values is that value. So it does no harm to average what an earlier step
has accumulated once more, or a parameter that two stages of this rank share at the end of each.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PipelineError
from penstock.execute.accelerator import is_queued
from penstock.execute.parameters.gradient_store import GradientStore, dense_gradient
from penstock.execute.parameters.layout import ParameterLayout
from penstock.execute.transport.backend_links import GlooWaiter, QueuedMessage
from penstock.execute.undocumented_modules import averaged_parameters, averages, broadcast_buffers
from penstock.running_time import running_s


@dataclass(eq=False)
class Averaged(ParameterLayout):
    """Parameters of which some are in DDP modules; their gradients are averaged over the replicas."""

    _modules: Mapping[int, Sequence[DistributedDataParallel]]
    """DDP modules by stage."""
    _store: GradientStore
    _tied_ids: Collection[int]
    """Ids of parameters that other ranks of the pipeline hold too."""
    _limit_s: Callable[[], float]
    _is_synced: Mapping[int, bool] = field(default_factory=dict)
    """Whether the caller wants this step's gradients averaged, by id of a module."""
    _always_reduced_ids: Collection[int] = ()
    _not_reducing: ExitStack = field(default_factory=ExitStack)
    _waiter: GlooWaiter = field(default_factory=GlooWaiter)

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None:
        """Keep DDP from reducing by itself until the step is over; `reduce` averages if `is_synced`."""
        modules = list(chain.from_iterable(self._modules.values()))
        self._always_reduced_ids = self._tied_ids if sums_tied else ()
        # `averages` is False within the caller's own `no_sync()`.
        self._is_synced = {id(module): is_synced and averages(module) for module in modules}
        for module in modules:
            self._not_reducing.enter_context(module.no_sync())

    def end_step(self) -> None:
        self._not_reducing.close()

    def reduce(self, stage: int, *, is_last: bool) -> None:
        """Average the gradients of a stage over the replicas, and take the first replica's buffers.

        Under the caller's `no_sync()` this is left to a later step, except for tied parameters: their gradients of
        earlier steps are set aside while a step runs.

        Raises:
            PipelineError: a replica does not come within the deadline.
        """
        for module in self._modules[stage] if is_last else ():
            is_synced = self._is_synced[id(module)]
            always_reduced_ids = self._always_reduced_ids
            parameters = [p for p in averaged_parameters(module) if is_synced or id(p) in always_reduced_ids]
            self._average(stage, parameters, module.process_group)
            if is_synced:
                self._take_from_first(stage, broadcast_buffers(module), module.process_group)

    def _average(self, stage: int, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Average where any replica has a gradient; one that has none counts as zeros, as with DDP."""
        if not parameters:
            return
        has_gradient = [self._store.of(parameter) is not None for parameter in parameters]
        # Every replica must run the same collectives, so they agree first on which gradients exist anywhere.
        num_users = torch.tensor(has_gradient, dtype=torch.int32, device=parameters[0].device)
        self._run(stage, group, dist.all_reduce, [num_users])
        used_parameters = [param for param, count in zip(parameters, num_users.tolist(), strict=True) if count]
        averages = [dense_gradient(parameter, self._store.attribute).contiguous() for parameter in used_parameters]
        for average in averages:
            average /= group.size()  # before the sum, which may overflow in float16
        self._run(stage, group, dist.all_reduce, averages)
        for parameter, average in zip(used_parameters, averages, strict=True):
            self._store.put(parameter, average)

    def _take_from_first(self, stage: int, buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Copy the first replica's buffers, as DDP does in the next forward."""
        values = [buffer.detach().contiguous() for buffer in buffers]
        self._run(stage, group, partial(dist.broadcast, group_src=0), values)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.detach().copy_(value)

    def _run(
        self, stage: int, group: dist.ProcessGroup, collective: Callable[..., dist.Work], tensors: Sequence[Tensor]
    ) -> None:
        limit_s = self._limit_s()
        end_s = running_s() + limit_s
        works = [collective(tensor, group=group, async_op=True) for tensor in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            pending = (QueuedMessage if is_queued(tensor.device) else self._waiter.message)(work, tensor)
            try:
                pending.wait(end_s - running_s())
            except RuntimeError as error:
                raise PipelineError(
                    f"stage {stage}: its gradients were not averaged over ranks "
                    f"{', '.join(map(str, dist.get_process_group_ranks(group)))} within {limit_s:g} s "
                    f"({error or 'a replica did not come'}). Every replica must run the same steps; if one has failed, "
                    "start all ranks again"
                ) from error


def wrapped(layers: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDP modules in some layers, each once."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [module for module in modules if isinstance(module, DistributedDataParallel)]
