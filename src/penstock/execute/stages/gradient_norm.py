"""The norm of the gradients of all ranks, and clipping by it, with the same bits however the model is split."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.stages.stage import distinct
from penstock.execute.values.tensors import is_dtensor, is_replicated, local_part

Gather = Callable[[object], list[Any]]
"""Gives the values of all ranks, in rank order; a collective."""


def norms_of(
    named_tensors: Sequence[tuple[str, Tensor]], norm_type: float = 2.0, across: Gather | None = None
) -> dict[str, float]:
    """Return the norm of each of some tensors, computed in float64; `across` is that of `clip_gradients`."""
    parts = [local_part(tensor) if across else tensor for _, tensor in named_tensors]
    norms = [torch.linalg.vector_norm(_values(part), norm_type, dtype=torch.float64) for part in parts]
    # all norms are under way before they are waited for, once
    values = torch.stack([_whole(norm) for norm in norms]).tolist() if norms else []
    local_norms = {name: norm for (name, _), norm in zip(named_tensors, values, strict=True)}
    if across is None:
        return local_norms
    replicated = {name for name, tensor in named_tensors if is_replicated(tensor)}
    return _over_replicas(across, local_norms, replicated, norm_type)


def clip_gradients(
    named_gradients: Iterable[tuple[str, Tensor | None]],
    all_gather: Gather,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    skip: Collection[str] = (),
    across: Gather | None = None,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale this rank's gradients in place so that the norm over all ranks is at most `max_norm`; return that norm.

    Every rank of the pipeline calls this function with its own gradients and an `all_gather` that returns the values of
    all ranks in rank order. The result is the norm before the scaling. Where `max_norm` is 0 or infinite, nothing is
    scaled. A norm that is not finite scales as in `torch.nn.utils.clip_grad_norm_`: an infinite one by 0, NaN by NaN.

    The norm of each parameter is computed in float64, and these norms are combined in the order of the parameters'
    names, so the result has the same bits on every rank and for every split of the layers into stages. A parameter
    that several ranks hold counts once. `skip` has the names of tied copies whose owner counts under another name;
    they are scaled but not counted. Where replicas shard each gradient, `across` gathers values over the replicas.

    Raises:
        PipelineError: the norm is not finite and `error_if_nonfinite`; nothing is scaled then.
    """
    gradients = [(name, gradient) for name, gradient in named_gradients if gradient is not None]
    # `distinct` lists a gradient once that two names of this rank share.
    counted_gradients = distinct((name, gradient) for name, gradient in gradients if name not in skip)
    local_norms = norms_of(counted_gradients, norm_type, across)
    total = _total_norm(all_gather(local_norms), norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise PipelineError(
            f"the norm of the gradients is {total}, so that they cannot be clipped; look at the loss, or pass "
            "error_if_nonfinite=False to scale them by it all the same"
        )
    scale = max_norm / (total + 1e-6)  # as torch has it
    if 0 < max_norm < math.inf and not scale >= 1:  # a scale of NaN, of a norm that is NaN, is not at least 1 either
        for _, gradient in distinct(gradients):
            (local_part(gradient) if across else gradient).mul_(scale)
    return total


def _values(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if values.is_complex():
        return values.abs()
    # torch has no norm of frozen weights in whole numbers, or in types of 8 bits
    return values if values.is_floating_point() and values.itemsize > 1 else values.to(torch.float64)


def _whole(norm: Tensor) -> Tensor:
    """Return a norm as a plain tensor; that of a DTensor is put together over its mesh."""
    plain_norm: Tensor = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]
    return plain_norm


def _total_norm(norms_of_ranks: list[dict[str, float]], norm_type: float) -> float:
    """Combine the norms per parameter of all ranks; of two ranks with the same name, the first counts."""
    norms: dict[str, float] = {}
    for rank_norms in reversed(norms_of_ranks):
        norms.update(rank_norms)
    # in the order of their names; a plain loop, since the precision of sum() depends on the Python version
    return _combined([norms[name] for name in sorted(norms)], norm_type)


def _over_replicas(
    across: Gather, local_norms: dict[str, float], replicated: Collection[str], norm_type: float
) -> dict[str, float]:
    """Combine the norms of the parts of each gradient; of one that each replica has as a whole, the first counts."""
    norms_of_replicas = across(local_norms)
    return {
        name: _combined([norms[name] for norms in norms_of_replicas[: 1 if name in replicated else None]], norm_type)
        for name in local_norms
    }


def _combined(norms: Sequence[float], norm_type: float) -> float:
    if math.isinf(norm_type):
        return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)
    total = 0.0
    for norm in norms:
        # a product, since a power may be rounded otherwise
        total += norm * norm if norm_type == 2 else norm**norm_type
    return math.sqrt(total) if norm_type == 2 else total ** (1 / norm_type)
