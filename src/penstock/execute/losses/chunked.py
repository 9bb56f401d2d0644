"""Losses of next tokens that never hold the logits of all positions: some positions at a time, under a checkpoint.

    forward    hidden [positions, width] ──► chunk 0: tail, log_softmax, one number per position; the rest is dropped
                                         ──► chunk 1: ...
    backward   chunk by chunk: its logits are computed again, then their gradients

So a last stage holds its hidden states and the logits of one chunk. The numbers are those of the unchunked loss.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError, PenstockError
from penstock.execute.losses.head_gradients import HeadProducts, count_products
from penstock.execute.losses.ignored import IGNORED, require_in_vocabulary, require_int64
from penstock.execute.losses.tails import Tail, TailedOutput, as_positions

Chunk = int | Literal["auto"]
"""The most positions of a chunk; 'auto': so many that their logits take up as much memory as all hidden states."""
AUTO: Literal["auto"] = "auto"
LEAST_AUTO = 256
"""Positions of a chunk below which matrix products get slower."""
NUM_EXAMPLES = 3
"""Positions of the example by which a tail is tried."""
LABELS = "labels"
"""The key of the labels in a target that has more than these."""


def require_chunk(chunk: object) -> None:
    """Refuse a size of chunks that is none. Raises: ConfigError."""
    if chunk != AUTO and not (type(chunk) is int and chunk > 0):
        raise ConfigError(f"{chunk!r}; expected a number of positions of at least 1, or {AUTO!r}", key="chunk")


def label_log_probs(output: Any, labels: Tensor, *, chunk: Chunk = AUTO) -> Tensor:
    """Return the log-probability of each label at its own position, in float32 (float64 of such hidden states).

    `output` is a `TailedOutput`, whose tail returns logits [1, positions, vocabulary]. `labels` is of the shape of the
    hidden states without their width, of int64. A label of -100 gets 0.

    Raises:
        PenstockError: shapes do not fit, or a label is none of the vocabulary.
    """
    require_chunk(chunk)
    _require_fitting(output, labels)
    hidden, positions = as_positions(output.hidden), labels.reshape(1, -1)
    num_positions = positions.shape[1]
    example_logits = _example_logits(output.tail, hidden)
    size = _auto_size(output.hidden, example_logits) if chunk == AUTO else chunk
    num_chunks = max(-(-num_positions // size), 1)
    # Chunks of nearly one size: a last one of few positions would take other kernels, and give other bits.
    sizes = [(num_positions + index) // num_chunks for index in reversed(range(num_chunks))]
    # `split` has one node in the graph, where slices would have one each, with a gradient of the size of all positions.
    parts = zip(torch.split(hidden, sizes, dim=1), torch.split(positions, sizes, dim=1), strict=True)
    products = HeadProducts()
    compute = partial(_log_probs, output.tail, products)
    if torch.is_grad_enabled():
        # The tail draws nothing: what depends on random numbers is no tail.
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    results = torch.cat([compute(*part) for part in parts])
    count_products(results, hidden)
    return results.view(labels.shape)


def _log_probs(tail: Tail, products: HeadProducts, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities [positions] of labels [1, positions]."""
    with products:
        logits = tail(hidden).flatten(0, 1)
    require_in_vocabulary(labels, logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")


@torch.no_grad()
def _example_logits(tail: Tail, hidden: Tensor) -> Tensor:
    """Return the outputs of a few positions of hidden states [1, positions, width], far from each other.

    A tail that must be tried first, as that of a cut model, is tried here: within the chunks, checkpoints and sums of
    gradients count what runs. It is given a copy, which it may change.
    """
    distance = max(hidden.shape[1] // NUM_EXAMPLES, 1)
    logits: Tensor = tail(hidden[:, ::distance][:, :NUM_EXAMPLES].clone())
    return logits


def _auto_size(hidden: Tensor, logits: Tensor) -> int:
    """Return the positions whose logits take up as much memory as all hidden states, at least `LEAST_AUTO`."""
    num_bytes: int = logits.shape[-1] * max(logits.element_size(), torch.float32.itemsize)
    return max(hidden.nbytes // num_bytes, LEAST_AUTO)


def _require_fitting(output: Any, labels: Any) -> None:
    """Refuse what is no hidden state with a tail, or has no label for each position. Raises: PenstockError."""
    if not isinstance(output, TailedOutput):
        raise PenstockError(
            f"the loss is computed in chunks of positions, but got a {type(output).__name__} as the output of the "
            "model; give it to Pipeline as loss=, whose last stage then hands it hidden states"
        )
    if not isinstance(output.hidden, Tensor):
        raise PenstockError(
            f"the last layer gets a {type(output.hidden).__name__} and not one hidden state, so that no loss can apply "
            "it in chunks of positions; take a loss of its outputs, such as the model's own"
        )
    if not isinstance(labels, Tensor) or output.hidden.shape[:-1] != labels.shape:
        shape = tuple(labels.shape) if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise PenstockError(
            f"hidden states of shape {tuple(output.hidden.shape)} need labels of shape "
            f"{tuple(output.hidden.shape[:-1])}, one for each position, but they have {shape}"
        )
    require_int64(labels)


def next_labels(labels: Tensor) -> Tensor:
    """Return, at each position of rows [..., length], the label of the next one; -100 at the last.

    Raises: PenstockError, if they are not of int64.
    """
    require_int64(labels)
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def chunked_cross_entropy(output: Any, target: Tensor, *, chunk: Chunk = AUTO, shift: bool = False) -> Tensor:
    """Return the mean cross entropy over the labels that are not -100, some positions at a time; 0 where none is left.

    It is a loss for `Pipeline`, which gives it hidden states and the last layer as a function of them. `chunk` is the
    most positions at a time; 'auto' takes so many that their logits take up as much memory as all hidden states. With
    `shift`, the label of a position is that of the next one, as for transformers' causal decoders, whose pipelines set
    it by themselves, and count their labels. Other arguments are given by functools.partial.

    Raises:
        PenstockError: shapes do not fit, or the last layer treats positions together.
    """
    labels = next_labels(target) if shift else target
    log_probs = label_log_probs(output, labels, chunk=chunk)
    return -log_probs.sum() / (labels != IGNORED).sum().clamp(min=1)


chunked_cross_entropy.takes_tail = True  # type: ignore[attr-defined]
chunked_cross_entropy.ignores_labels = True  # type: ignore[attr-defined]


class LogProbsLoss:
    """A loss that is a function of the log-probabilities of each row's next tokens, and of the target."""

    takes_tail = True

    def __init__(self, function: Callable[..., Any], *, chunk: Chunk = AUTO) -> None:
        """Raises: ConfigError, if `function` cannot be called, or `chunk` is no size."""
        if not callable(function):
            raise ConfigError(
                f"a {type(function).__name__}; expected a function of log_probs and target", key="function"
            )
        require_chunk(chunk)
        self._function, self._chunk = function, chunk
        # Pipeline looks at the parameters of a loss, for a keyword `weight`.
        self.__signature__ = inspect.signature(function)

    def __call__(self, output: Any, target: Any, **keywords: Any) -> Any:
        labels = target.get(LABELS) if isinstance(target, Mapping) else target
        if not isinstance(labels, Tensor):
            raise PenstockError(
                f"the target is a {type(target).__name__} without a tensor of labels; pass the labels [rows, length] "
                f"themselves, or a dict that has them under {LABELS!r}"
            )
        log_probs = label_log_probs(output, next_labels(labels), chunk=self._chunk)
        return self._function(log_probs[..., :-1], target, **keywords)
