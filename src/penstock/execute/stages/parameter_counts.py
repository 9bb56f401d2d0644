"""How many parameters the stages of a rank hold, and which of them other stages hold too."""

from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from penstock.execute.stages.assemble import Assembly


def count_parameters(assembly: Assembly) -> dict[str, list[list[int]]]:
    """Return the fields of `partition.split.ParameterCounts` for the stages of this rank, as values for JSON.

    A parameter without a shape before its first input counts nothing.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    shared: Counter[tuple[int, ...]] = Counter()
    copied: Counter[tuple[int, ...]] = Counter()
    counted_in: dict[int, int] = {}  # by id of a parameter, its stage
    for stage in sorted(assembly.stages, key=lambda each: each.first_layer):
        counts[stage.index,] = 0
        for _, parameter in stage.named_parameters():
            first = counted_in.setdefault(id(parameter), stage.index)
            if first == stage.index:
                counts[first,] += _size(parameter)
            else:
                shared[stage.index, first] += _size(parameter)
    for group, copy in assembly.tied_copies.items():
        owner = assembly.tied_groups[group][0]
        for parameter in () if (owner,) in counts else copy.parameters.values():
            copied[counted_in[id(parameter)], owner] += _size(parameter)
    return {"of_stage": _rows(counts), "shared": _rows(shared), "copied": _rows(copied)}


def _rows(numbers: Mapping[tuple[int, ...], int]) -> list[list[int]]:
    return [[*stages, number] for stages, number in numbers.items()]


def _size(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()
