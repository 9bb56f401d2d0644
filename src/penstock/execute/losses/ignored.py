"""Targets that a loss leaves out of its mean, as cross entropy does with those of `ignore_index`.

A mean over fewer targets has a smaller share in the mean over the batch. torch's own cross entropy is known to leave
them out; of another function nobody can tell, so a batch in which it would matter is warned of.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.execute.values.tree import tensors_of

IGNORED = -100
"""torch's default of `ignore_index`."""
_CLASSES = (torch.int64, torch.int32, torch.uint8)
"""Types of targets that are classes."""


def ignored_target(loss: Any) -> int | None:
    """Return the class that a loss leaves out of its mean, where it is torch's own cross entropy; else None."""
    settings: dict[str, Any] = {}
    while isinstance(loss, partial) and not loss.args:
        settings = {**loss.keywords, **settings}
        loss = loss.func
    if type(loss) is nn.CrossEntropyLoss and not settings:
        settings = {name: getattr(loss, name) for name in ("weight", "reduction", "ignore_index")}
    elif loss is not nn.functional.cross_entropy:
        return None
    is_mean = settings.get("reduction", "mean") == "mean" and not {"size_average", "reduce"} & settings.keys()
    # With weights of classes, the mean is one over these, not over the targets.
    return int(settings.get("ignore_index", IGNORED)) if is_mean and settings.get("weight") is None else None


def counted_share(target: Any, ignored: int, size: float) -> float:
    """Return how many targets of a part of a batch are not ignored; its size where the target holds no classes.

    Parts may have other numbers of targets in a row, as microbatches that are padded on their own have.
    """
    if not (isinstance(target, Tensor) and _holds_classes(target)):
        return size
    return target.numel() - _num_equal(target, ignored)


def uneven_targets(targets: Sequence[Any]) -> tuple[int, int] | None:
    """Return two microbatches that hold different shares of ignored targets; None where all hold the same."""
    shares = [ignored_shares(target, IGNORED) for target in targets]
    uneven_indices = [index for index, share in enumerate(shares) if share != shares[0]]
    return (0, uneven_indices[0]) if uneven_indices else None


def ignored_shares(target: Any, ignored: int) -> list[float]:
    """Return the share of ignored targets in each tensor of a tree.

    Targets on a device are not read, since the host would have to wait for it in every step.
    """
    return [_ignored_share(tensor, ignored) for tensor in tensors_of(target) if tensor.device.type == "cpu"]


def count_ignored(target: Any) -> int:
    """Return how many targets of a tree are ignored by default."""
    return sum(_num_equal(tensor, IGNORED) for tensor in tensors_of(target) if _holds_classes(tensor))


def _ignored_share(target: Tensor, ignored: int) -> float:
    return _num_equal(target, ignored) / target.numel() if _holds_classes(target) and target.numel() else 0.0


def _num_equal(target: Tensor, value: int) -> int:
    # As whole numbers of 64 bits: to a uint8, -100 would be the class 156.
    return int((target.to(torch.int64) == value).sum())


def _holds_classes(target: Tensor) -> bool:
    return target.dtype in _CLASSES and not target.is_meta
