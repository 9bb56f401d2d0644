"""Which layers that reduce gradients by themselves can be run, and under which schedules.

DistributedDataParallel    its gradients are averaged where a stage's are whole (parameters/averaged.py)
fully_shard                reduces at the end of a stage's last backward (parameters/fully_sharded.py): right unless a
                           weight gradient comes after that end
DTensor parameters         (parallelize_module) reduce within the operations themselves
FullyShardedDataParallel, replicate of torch.distributed._composable    refused
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import ConfigError
from penstock.execute.stages.keywords import layer_place
from penstock.execute.stages.stage import Stage
from penstock.execute.undocumented_modules import has_dtensors, is_replicated, special_options
from penstock.execute.values.tensors import is_dtensor
from penstock.ir.schedule import Schedule


def refuse_wrappers(stages: Sequence[Stage], schedule: Schedule, ranks: Collection[int]) -> None:
    """Refuse layers whose own reduction would be wrong here; `ranks` are the pipeline's, as torch counts them.

    Raises:
        ConfigError: naming the layer, the wrapper, and the fix.
    """
    for stage, place, module in _modules(stages):
        problem = _problem(module, ranks)
        if problem:
            raise ConfigError(f"stage {stage.index}, {place}: {problem}")
    problem = unsplittable(stages, schedule.split_stages, schedule.name)
    if problem:
        raise ConfigError(problem)


def refuse_reduced_twice(stages: Sequence[Stage]) -> None:
    """Refuse layers that reduce gradients by themselves, where the pipeline has replicas or shards.

    Raises:
        ConfigError: naming the layer.
    """
    for stage, place, module in _modules(stages):
        wrapper = "DistributedDataParallel" if isinstance(module, DistributedDataParallel) else "fully_shard"
        if isinstance(module, DistributedDataParallel) or is_sharded(module):
            raise ConfigError(
                f"stage {stage.index}, {place}: {wrapper} reduces its gradients, which the mesh of the pipeline does "
                "already; leave the wrapper out"
            )
        if any(map(is_dtensor, module.parameters(recurse=False))):
            raise ConfigError(
                f"stage {stage.index}, {place}: its parameters are DTensors, which replicas and shards of a pipeline "
                "cannot hold yet; leave them plain, or leave out shard and pass a mesh whose data dimension is 1"
            )


def unsplittable(stages: Sequence[Stage], split_stages: Collection[int], schedule: str) -> str:
    """Say which layer's backward may not be split, and the fix; empty where all may.

    `fully_shard` reduces at the end of a backward: what a weight gradient adds later would not be reduced.
    """
    for stage, place, module in _modules(stages):
        if stage.index in split_stages and is_sharded(module):
            return (
                f"stage {stage.index}, {place}: fully_shard reduces gradients at the end of a backward, but {schedule} "
                "splits backwards into I and W, and what W adds would not be reduced. Take a schedule with whole "
                "backwards, such as 1f1b or interleaved-1f1b, or wrap the layer in DistributedDataParallel"
            )
    return ""


def fully_sharded_modules(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules in some layers that `fully_shard` has been applied to, each once."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [module for module in modules if is_sharded(module)]


def averages_gradients(stages: Sequence[Stage]) -> bool:
    """Whether a layer averages its gradients over other ranks by itself."""
    return any(
        isinstance(module, DistributedDataParallel) or is_sharded(module) or any(map(is_dtensor, module.parameters()))
        for _, _, module in _modules(stages)
    )


def reshard(stages: Sequence[Stage]) -> None:
    """Free what forwards without a backward have gathered: later forwards would use it, whatever the optimizer did."""
    for module in fully_sharded_modules(layer for stage in stages for layer in stage.modules):
        module.reshard()  # type: ignore[operator]


# The next two by their methods, since torch.distributed.fsdp takes half a second to import.


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been applied to a module itself."""
    return hasattr(module, "reshard") and hasattr(module, "unshard")


def is_first_fsdp(module: nn.Module) -> bool:
    """Whether a module is a FullyShardedDataParallel, the wrapper before `fully_shard`."""
    return hasattr(module, "summon_full_params")


def _modules(stages: Sequence[Stage]) -> Iterator[tuple[Stage, str, nn.Module]]:
    for stage in stages:
        for name, layer in stage.layers.items():
            for module in layer.modules():
                yield stage, layer_place(name, layer), module


def _problem(module: nn.Module, ranks: Collection[int]) -> str:
    if isinstance(module, DistributedDataParallel):
        return _problem_of_ddp(module, ranks)
    if is_first_fsdp(module):
        return (
            "FullyShardedDataParallel cannot have several microbatches between forward and backward; use "
            "torch.distributed.fsdp.fully_shard"
        )
    if is_replicated(module):
        return (
            "torch.distributed._composable.replicate reduces in the first backward after a forward, whichever "
            "microbatch's it is; wrap the layer in DistributedDataParallel(layer, process_group=...)"
        )
    for parameter in module.parameters(recurse=False):
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and (pipeline_ranks := _other_pipeline_ranks(mesh.mesh.flatten().tolist(), ranks)):
            return (
                f"its parameters are spread over the mesh {mesh}, which has rank {pipeline_ranks[0]} of this pipeline, "
                "where the layer does not run; give the mesh of the replicas, such as mesh['replica']"
            )
    return ""


def _problem_of_ddp(module: DistributedDataParallel, ranks: Collection[int]) -> str:
    wrapper = "DistributedDataParallel"
    if options := special_options(module):
        return (
            f"{wrapper} with {', '.join(options)}: its gradients are reduced here, once a step, as a plain average; "
            f"leave {'it' if len(options) == 1 else 'them'} out, or leave {wrapper} out and reduce in reduce_stage"
        )
    if has_dtensors(module):
        return f"{wrapper} around parameters that are DTensors; use fully_shard on a mesh of both dimensions instead"
    if pipeline_ranks := _other_pipeline_ranks(dist.get_process_group_ranks(module.process_group), ranks):
        return (
            f"the process group of {wrapper} has rank {pipeline_ranks[0]} of this pipeline, where the layer does not "
            "run; give process_group= the group of its replicas, such as mesh.get_group('replica')"
        )
    return ""


def _other_pipeline_ranks(members: Collection[int], ranks: Collection[int]) -> list[int]:
    """Return the other ranks of the pipeline that are in a group, this rank left out."""
    return sorted(set(members) & set(ranks) - {dist.get_rank()}) if ranks else []
