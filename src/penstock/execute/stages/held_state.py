"""The parameters and buffers of a rank's stages: whether replicas hold the same, and how many parameters there are."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, starmap
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import ConfigError
from penstock.execute.control.agreement import digest
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.names import full_name
from penstock.execute.stages.stage import Stage, distinct
from penstock.execute.transport.places import Places


def held_tensors(stages: Iterable[Stage]) -> list[Tensor]:
    """Return the parameters and buffers of some stages, each once, in the order of the layers."""
    return [tensor for _, tensor in distinct(chain.from_iterable(map(_named_tensors, stages)))]


def held_settings(stages: Iterable[Stage]) -> dict[str, dict[str, Any]]:
    """Return, by name of a module, what it computes by and no tensor says, such as the scale of an adapter.

    A layer says so by its method `module_settings`. Values are plain numbers.
    """
    named_layers = [item for stage in stages for item in stage.layers.items()]
    return {
        full_name(layer, module, name): dict(settings)
        for layer, module in named_layers
        for name, settings in getattr(module, "module_settings", dict)().items()
    }


def described_state(stages: Iterable[Stage]) -> dict[str, int]:
    """Return, per stage, a digest of what it holds: names, shapes and types, and the settings of modules.

    Raises:
        ConfigError: a parameter has no shape before its first input, so the first replica has nothing to give.
    """
    return {
        str(stage.index): digest("; ".join([*starmap(_described, _named_tensors(stage)), str(held_settings([stage]))]))
        for stage in stages
    }


def require_equal_replicas(digests_of_ranks: Sequence[Mapping[str, int]], places: Places) -> None:
    """Compare what `described_state` found on all ranks, one replica after another.

    Raises:
        ConfigError: on every rank alike, naming the stage and the ranks.
    """
    for index, digests in enumerate(digests_of_ranks):
        first = index % places.pipeline.num_ranks
        for stage, digest_of_stage in digests.items():
            if digest_of_stage != digests_of_ranks[first].get(stage):
                raise ConfigError(
                    f"stage {stage} holds other parameters or buffers on {places.names[index]} than on "
                    f"{places.names[first]}, in name, shape or type, or the scale of an adapter; let all replicas "
                    "build the same layers",
                    key="layers",
                )


def count_parameters(assembly: Assembly) -> dict[str, list[list[int]]]:
    """Return the fields of `partition.split.ParameterCounts` for the stages of this rank, as values for JSON.

    A parameter without a shape before its first input counts nothing.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    shared: Counter[tuple[int, ...]] = Counter()
    copied: Counter[tuple[int, ...]] = Counter()
    frozen: Counter[tuple[int, ...]] = Counter()
    counted_in: dict[int, int] = {}  # by id of a parameter, its stage
    for stage in sorted(assembly.stages, key=lambda stage: stage.first_layer):
        counts[stage.index,] = 0
        for _, parameter in stage.named_parameters():
            first = counted_in.setdefault(id(parameter), stage.index)
            if first == stage.index:
                counts[first,] += _size(parameter)
                frozen[first,] += 0 if parameter.requires_grad else _size(parameter)
            else:
                shared[stage.index, first] += _size(parameter)
    for group, copy in assembly.tied_copies.items():
        owner = assembly.tied_groups[group][0]
        for parameter in () if (owner,) in counts else copy.parameters.values():
            copied[counted_in[id(parameter)], owner] += _size(parameter)
    fields = {"of_stage": counts, "shared": shared, "copied": copied, "frozen": +frozen}
    return {name: _rows(numbers) for name, numbers in fields.items()}


def _named_tensors(stage: Stage) -> list[tuple[str, Tensor]]:
    return [
        (full_name(layer, module, name), tensor)
        for layer, module in stage.layers.items()
        for named_tensors in (module.named_parameters(), module.named_buffers())
        for name, tensor in named_tensors
    ]


def _described(name: str, tensor: Tensor) -> str:
    if is_lazy(tensor):
        raise ConfigError(
            f"{name!r} has no shape before its first input, so that replicas cannot begin with equal values; give its "
            "layer its sizes when it is built",
            key="layers",
        )
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}"


def _rows(numbers: Mapping[tuple[int, ...], int]) -> list[list[int]]:
    return [[*stages, number] for stages, number in numbers.items()]


def _size(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()
