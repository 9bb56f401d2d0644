"""Targets that a loss leaves out of its mean, as cross entropy does with those of `ignore_index`.

A mean over fewer targets has a smaller share in the mean over the batch, and so has one over targets of classes that
weigh less. torch's own cross entropy is known to leave targets out and to divide by the weights of the others; of
another function nobody can tell, so a batch in which it would matter is warned of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.execute.values.tree import tensors_of

IGNORED = -100
"""torch's default of `ignore_index`."""
_CLASSES = (torch.int64, torch.int32, torch.uint8)
"""Types of targets that are classes."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedTargets:
    """The targets that a loss of torch, cross entropy or negative log likelihood, is a mean over."""

    ignored: int
    """The class of targets that the mean leaves out."""
    class_weights: Tensor | None = None
    """[classes]: the weight of a target of each class in the mean; None where all weigh the same."""

    def share(self, target: Any, size: float) -> float:
        """Return what a part of a batch has of the mean's divisor; its size where the target holds no classes.

        Parts may have other numbers of targets in a row, as microbatches that are padded on their own have.
        """
        if not (isinstance(target, Tensor) and _holds_classes(target)):
            return size
        if self.class_weights is None:
            return target.numel() - _num_equal(target, self.ignored)
        classes = target.to(torch.int64)
        classes = classes[classes != self.ignored]
        weights = self.class_weights.detach().to(classes.device, torch.float64)
        # A class that does not exist is left to the loss function, which says so better.
        return float(weights[classes.clamp(0, len(weights) - 1)].sum())

    def streamed_shares(self, target: Any) -> list[float]:
        """Return what decides how a part of a stream weighs beside its size; nothing is read from a device."""
        if self.class_weights is None or not _is_on_host(target):
            return ignored_shares(target, self.ignored)
        # In another order of the targets, the same weights add up to another last digit.
        return [float(f"{self.share(target, 1.0) / max(target.numel(), 1):.9g}")]


def counted_targets(loss: Any) -> CountedTargets | None:
    """Return what a loss is a mean over, where it is torch's cross entropy or `nll_loss`; else None."""
    settings: dict[str, Any] = {}
    while isinstance(loss, partial) and not loss.args:
        settings = {**loss.keywords, **settings}
        loss = loss.func
    if getattr(loss, "ignores_labels", False) and not settings.get("shift"):  # the chunked cross entropy
        return CountedTargets(IGNORED)
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) and not settings:
        settings = {name: getattr(loss, name) for name in ("weight", "reduction", "ignore_index")}
    elif not any(loss is function for function in (nn.functional.cross_entropy, nn.functional.nll_loss)):
        return None
    if settings.get("reduction", "mean") != "mean" or {"size_average", "reduce"} & settings.keys():
        return None
    return CountedTargets(int(settings.get("ignore_index", IGNORED)), settings.get("weight"))


def require_int64(labels: Tensor) -> None:
    """Refuse labels of another type, some of which hold no -100. Raises: PenstockError."""
    if labels.dtype != torch.int64:
        raise PenstockError(
            f"labels are of {labels.dtype}; expected torch.int64, which holds {IGNORED} too: pass labels.long()"
        )


def require_in_vocabulary(labels: Tensor, size: int) -> None:
    """Refuse labels of int64 that are neither -100 nor one of `size` classes. Raises: PenstockError."""
    # A device would have to be waited for; there torch's own kernel ends the process.
    counted_labels = labels[labels != IGNORED] if _is_on_host(labels) else labels[:0]
    if not counted_labels.numel():
        return
    least, largest = (int(label) for label in counted_labels.aminmax())
    if least < 0:
        raise PenstockError(
            f"label {least}; expected one from 0 to {size - 1}, or {IGNORED} where nothing is to be learned"
        )
    if largest >= size:
        raise PenstockError(
            f"label {largest}, but the model has a vocabulary of {size}; take the tokenizer of the model, or a model "
            "whose embeddings were resized to it"
        )


def uneven_targets(targets: Sequence[Any]) -> tuple[int, int] | None:
    """Return two microbatches that hold different shares of ignored targets; None where all hold the same."""
    shares = [ignored_shares(target, IGNORED) for target in targets]
    uneven_indices = [index for index, share in enumerate(shares) if share != shares[0]]
    return (0, uneven_indices[0]) if uneven_indices else None


def ignored_shares(target: Any, ignored: int) -> list[float]:
    """Return the share of ignored targets in each tensor of a tree.

    Targets on a device are not read, since the host would have to wait for it in every step.
    """
    return [_ignored_share(tensor, ignored) for tensor in tensors_of(target) if _is_on_host(tensor)]


def count_ignored(target: Any) -> int:
    """Return how many targets of a tree are ignored by default."""
    return sum(_num_equal(tensor, IGNORED) for tensor in tensors_of(target) if _holds_classes(tensor))


def _ignored_share(target: Tensor, ignored: int) -> float:
    return _num_equal(target, ignored) / target.numel() if _holds_classes(target) and target.numel() else 0.0


def _num_equal(target: Tensor, value: int) -> int:
    # As whole numbers of 64 bits: to a uint8, -100 would be the class 156.
    return int((target.to(torch.int64) == value).sum())


def _is_on_host(target: Any) -> bool:
    return isinstance(target, Tensor) and target.device.type == "cpu"


def _holds_classes(target: Tensor) -> bool:
    return target.dtype in _CLASSES and not target.is_meta
