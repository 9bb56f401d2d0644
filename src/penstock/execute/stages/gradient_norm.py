"""The norm of the gradients of all ranks, and clipping by it, with the same bits however the model is split."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import cast

import torch
from torch import Tensor

from penstock.execute.stages.stage import distinct
from penstock.execute.values.tensors import is_dtensor


def clip_gradients(
    named_gradients: Iterable[tuple[str, Tensor | None]],
    all_gather: Callable[[object], list[object]],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    skip: Collection[str] = (),
) -> float:
    """Scale this rank's gradients in place so that the norm over all ranks is at most `max_norm`; return that norm.

    Every rank calls it with its own gradients and an `all_gather` that gives the values of all ranks in rank order.
    The norm is as it was before the scaling. Where it is not finite, or `max_norm` is 0 or infinite, nothing is scaled.

    The norm of each parameter is computed in float64, and these are combined in the order of the parameters' names: the
    same bits on every rank and for every split. A name that several ranks hold counts once; the tied copies that
    another name stands for are named in `skip`, and are scaled but not counted.
    """
    gradients = [(name, gradient) for name, gradient in named_gradients if gradient is not None]
    counted = distinct((name, gradient) for name, gradient in gradients if name not in skip)
    norms = [torch.linalg.vector_norm(_values(gradient), norm_type, dtype=torch.float64) for _, gradient in counted]
    # all norms are under way before they are waited for, once
    values = torch.stack([_whole(norm) for norm in norms]).tolist() if norms else []
    own = {name: norm for (name, _), norm in zip(counted, values, strict=True)}
    total = _total_norm(cast("list[dict[str, float]]", all_gather(own)), norm_type)
    scale = max_norm / (total + 1e-6)  # as torch has it
    if 0 < scale < 1:  # neither holds for a norm that is not finite
        for _, gradient in distinct(gradients):
            gradient.mul_(scale)
    return total


def _values(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values.abs() if values.is_complex() else values


def _whole(norm: Tensor) -> Tensor:
    """Return a norm as a plain tensor; that of a DTensor is put together over its mesh."""
    whole: Tensor = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]
    return whole


def _total_norm(norms_of_ranks: list[dict[str, float]], norm_type: float) -> float:
    """Combine the norms per parameter of all ranks; of two ranks with the same name, the first counts."""
    norms: dict[str, float] = {}
    for own in reversed(norms_of_ranks):
        norms.update(own)
    if math.isinf(norm_type):
        found = list(norms.values())
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
    total = 0.0  # a plain loop: the precision of sum() depends on the Python version
    for name in sorted(norms):
        # a product, since a power may be rounded otherwise
        total += norms[name] * norms[name] if norm_type == 2 else norms[name] ** norm_type
    return math.sqrt(total) if norm_type == 2 else total ** (1 / norm_type)
