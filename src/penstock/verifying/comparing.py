"""Which tensors of the ranks are not those of the unsplit model, and by how much."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from penstock.verifying.observation import BUFFER, GRADIENT, LOSS, OUTPUT, Observation, TensorsByName
from penstock.verifying.report import Comparison, Difference

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest differences that another order of sums explains, as shares of the largest value of a kind."""


def compare(
    whole: Sequence[Observation], ranks: Sequence[Sequence[Observation]], tolerance: float
) -> tuple[list[Comparison], list[Difference]]:
    """Compare what was observed of the unsplit model with what each rank observed of its part."""
    comparisons: dict[tuple[str, str], Comparison] = {}
    differences = []
    for index, observation in enumerate(whole):
        for kind in observation.tensors:
            start = whole[0].tensors.get(kind, {})
            errors = _worst_errors(kind, observation, [rank[index] for rank in ranks], start)
            key = observation.mode, kind
            earlier = comparisons.get(key, Comparison(*key, 0, 0.0))
            worst = max((error for error, _ in errors.values()), default=0.0)
            comparisons[key] = Comparison(*key, earlier.num_tensors + len(errors), max(earlier.error, worst))
            differences += [
                Difference(observation.mode, observation.batch, kind, name, _owner(kind, name), error, problem)
                for name, (error, problem) in errors.items()
                if error > tolerance
            ]
    return list(comparisons.values()), differences


def _owner(kind: str, name: str) -> str:
    """Return the module that a tensor belongs to; empty for outputs and losses."""
    return "" if kind in (OUTPUT, LOSS) else name.rpartition(".")[0]


def _worst_errors(
    kind: str, whole: Observation, ranks: Sequence[Observation], start: TensorsByName
) -> dict[str, tuple[float, str]]:
    """Return the largest error of each tensor of a kind, over the ranks, and what is wrong, if that is no number."""
    tensors = whole.tensors.get(kind, {})
    largest = max((largest_of(tensor) for tensor in tensors.values() if tensor is not None), default=0.0)
    errors: dict[str, tuple[float, str]] = {}
    for name, error, problem in _errors(kind, tensors, [rank.tensors.get(kind, {}) for rank in ranks], start, largest):
        errors[name] = max((error, problem), errors.get(name, (0.0, "")))
    return errors


def _errors(
    kind: str, tensors: TensorsByName, of_ranks: Sequence[TensorsByName], start: TensorsByName, largest: float
) -> Iterator[tuple[str, float, str]]:
    """Yield the name of each tensor, its error on each rank that has it, and what is wrong, where that is no number."""
    for name, tensor in tensors.items():
        holders = [held[name] for held in of_ranks if name in held]
        for value in holders:
            yield name, *_error_of(value, tensor, largest)
        if not holders and kind == BUFFER and (name not in start or _is_same(start[name], tensor)):
            continue  # nobody need hold a buffer that is not saved, or that nobody changes
        if not holders:
            yield name, inf, f"no rank has the {kind}"
    for held in of_ranks:
        for name in held.keys() - tensors.keys() if kind != BUFFER else ():
            yield name, inf, f"the model has no {'parameter' if kind == GRADIENT else kind} of this name"


def _is_same(tensor: Tensor | None, other: Tensor | None) -> bool:
    if tensor is None or other is None:
        return tensor is other
    return tensor.shape == other.shape and tensor.dtype == other.dtype and torch.equal(tensor, other)


def _error_of(value: Tensor | None, tensor: Tensor | None, largest: float) -> tuple[float, str]:
    if value is None or tensor is None:
        if value is tensor:
            return 0.0, ""
        return inf, "is missing" if value is None else "is there, and the unsplit model has none"
    return error_between(value, tensor, largest)


@torch.no_grad()
def error_between(value: Tensor, tensor: Tensor, largest: float) -> tuple[float, str]:
    """Return the largest difference of two tensors as a share of `largest`, and what is wrong if that is no number."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        shapes = [f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (value, tensor)]
        return inf, f"is of shape {shapes[0]}, in the unsplit model {shapes[1]}"
    if torch.equal(value, tensor) or not value.numel():
        return 0.0, ""
    if not (value.is_floating_point() or value.is_complex()):
        return inf, "has other values"
    close = value.isfinite() & tensor.isfinite()
    if not bool((close | (value == tensor) | (value.isnan() & tensor.isnan())).all()):
        return inf, "is not finite at other places than in the unsplit model"
    error = float((_exact(value) - _exact(tensor)).abs()[close].max()) if bool(close.any()) else 0.0
    return (error / largest if largest else inf if error else 0.0), ""


def largest_of(tensor: Tensor) -> float:
    """Return the largest finite absolute value; 0 where there is none."""
    values = _exact(tensor.detach()).abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def _exact(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.to(torch.float64)


def tolerance_of(tensors: Mapping[str, Tensor], *, is_transformers: bool) -> float:
    """Return what rounding explains in the lowest precision of a model's parameters.

    Norms, positions and losses of transformers compute in float32 in any type.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtypes |= {torch.float32} if is_transformers or not dtypes else set()
    return max(TOLERANCES.get(dtype, max(TOLERANCES.values())) for dtype in dtypes)
