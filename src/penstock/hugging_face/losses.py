"""The losses of models of transformers, as means over labels that a pipeline can add up over microbatches.

    causal decoders                  logits [batch, seq, vocabulary]    the label of the next position
    encoder-decoders, masked words   logits [batch, seq, vocabulary]    the label of the same position
    tokens                           logits [batch, seq, classes]       likewise
    sequences, images                logits [batch, classes]            by `problem_type` of the config

Labels are those of transformers; -100 is left out.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from penstock.errors import PenstockError
from penstock.execute.losses.ignored import IGNORED, require_in_vocabulary, require_int64
from penstock.hugging_face.undocumented import LossKind, loss_kind


class Loss(Protocol):
    """A loss of a model, and how many labels it is the mean of."""

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over the labels that count. Raises: PenstockError, where the shapes do not fit."""
        ...

    def count(self, labels: Tensor) -> int:
        """Return how many labels count."""
        ...


def loss_of(model: Any) -> Loss | None:
    """Return the loss that a model has for labels; None for a model whose loss has no form that is known here."""
    match loss_kind(model):
        case LossKind.SHIFTED:
            return ShiftedLoss(model.loss_function)
        case LossKind.TOKENS:
            return TokenLoss()
        case LossKind.CLASSES:
            return ClassLoss(model.config)
        case LossKind.UNKNOWN:
            return None


class ShiftedLoss:
    """The loss of causal decoders, computed by the model's own function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over labels, each of which is compared with the logits at the position before it."""
        _require_fitting(logits, labels, "the input_ids, not shifted,")
        _require_classes(labels[..., 1:], logits.shape[-1])
        number = max(self.count(labels), 1)
        return self._function(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=number)

    def count(self, labels: Tensor) -> int:
        """Return how many labels there are besides the first of each row, and those of -100."""
        return int((labels[..., 1:] != IGNORED).sum())


class TokenLoss:
    """The cross entropy of the label at each position."""

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over labels, each of which is compared with the logits at its own position."""
        _require_fitting(logits, labels, "a label for each position,")
        _require_classes(labels, logits.shape[-1])
        entropy = functional.cross_entropy(
            _at_least_float32(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return entropy / max(self.count(labels), 1)

    def count(self, labels: Tensor) -> int:
        """Return how many labels are not -100."""
        return int((labels != IGNORED).sum())


class ClassLoss:
    """The loss of classifiers: a class, several classes or numbers for each row, by the model's config."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of classes, the binary one of several, or the squared error of numbers."""
        if self._problem(labels) == SINGLE_LABEL:
            return TokenLoss().mean(logits, labels.reshape(logits.shape[:-1]))
        if logits.shape[-1] == 1 and labels.dim() < logits.dim():
            logits = logits.squeeze(-1)
        if logits.shape != labels.shape:
            raise PenstockError(
                f"logits of shape {tuple(logits.shape)} need labels of the same shape, but they have "
                f"{tuple(labels.shape)}; pass numbers, or ones and zeros for classes, by the problem_type of the config"
            )
        logits = _at_least_float32(logits)
        if self._problem(labels) == REGRESSION:
            return functional.mse_loss(logits, labels.to(logits.dtype))
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def count(self, labels: Tensor) -> int:
        """Return how many labels the loss is the mean of."""
        return TokenLoss().count(labels) if self._problem(labels) == SINGLE_LABEL else labels.numel()

    def _problem(self, labels: Tensor) -> str:
        """Return the problem_type of the config, else the one that transformers derives from the labels."""
        if self._config.problem_type is not None:
            return str(self._config.problem_type)
        if self._config.num_labels == 1:
            return REGRESSION
        return MULTI_LABEL if labels.is_floating_point() else SINGLE_LABEL


REGRESSION, SINGLE_LABEL = "regression", "single_label_classification"
MULTI_LABEL = "multi_label_classification"


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.element_size() >= 4 else logits.float()


def _require_fitting(logits: Any, labels: Tensor, labels_words: str) -> None:
    if not isinstance(logits, Tensor):
        raise PenstockError(
            f"the output of the model is a {type(logits).__name__} without logits; pass Pipeline a loss for it"
        )
    if logits.shape[:-1] != labels.shape:
        raise PenstockError(
            f"logits of shape {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}, but they have "
            f"{tuple(labels.shape)}; pass {labels_words} with -100 where nothing is to be learned"
        )


def _require_classes(labels: Tensor, number: int) -> None:
    """Refuse labels that are none of so many classes, nor -100. Raises: PenstockError."""
    require_int64(labels)
    require_in_vocabulary(labels, number)
