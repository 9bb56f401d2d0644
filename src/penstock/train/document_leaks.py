"""Whether a model of transformers keeps packed documents apart, as `data.packing = "documents"` and `"whole"` promise.

    positions      0 1 2 3 4 0 1 2 3 4      a row of two documents
    tokens         a b c d e p q r s t      of the first evaluation
    tokens         u v w x y p q r s t      of the second one
                             └───────┴      logits here must be equal

Some models read positions only for their embeddings, and others carry a state from token to token, whatever the
positions say: the second document then sees the first.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.config import RunConfig
from penstock.train.together import same_words

NUM_ROWS, MAX_LENGTH = 3, 32
ROUNDING = 8
"""Differences that rounding may make, in the distances between numbers around 1 of the type: experts get other numbers
of tokens in each evaluation, so that their products may be summed in another order."""


def require_separate_documents(config: RunConfig, pipeline: Pipeline, vocabulary: int) -> None:
    """Refuse to pack documents for a model of transformers in which one sees the one before it; every rank calls it.

    Two evaluations of three short rows decide. `vocabulary` is the number of token ids.

    Raises:
        ConfigError, on the rank of the last stage; PenstockError with its words on all others.
    """
    length = min(config.batch.length, MAX_LENGTH)
    length -= length % pipeline.schedule.num_slices
    if not config.data.packs.separates or not config.model.transformers or length < 2:
        return
    second = length // 2
    generator = torch.Generator().manual_seed(config.run.seed)
    tokens = torch.randint(vocabulary, (NUM_ROWS, length), generator=generator)
    other_tokens = tokens.clone()
    other_tokens[:, :second] = (tokens[:, :second] + 1) % vocabulary
    positions = torch.cat([torch.arange(second), torch.arange(length - second)]).repeat(NUM_ROWS, 1)
    logits, other_logits = (_logits(config, pipeline, rows, positions) for rows in (tokens, other_tokens))

    def compare() -> None:
        if logits is None:  # only the rank of the last stage has outputs
            return
        share = _largest_change(logits[:, second:], other_logits[:, second:])
        if share > ROUNDING * torch.finfo(_coarsest(logits, pipeline, Precision(config.precision))).eps:
            raise _leaks(config, share)

    pipeline.control.together(compare, same_words)


def _logits(config: RunConfig, pipeline: Pipeline, tokens: Tensor, positions: Tensor) -> Any:
    """Evaluate rows without compiling, since their shape is not that of the batches."""
    eager = torch.compiler.set_stance("force_eager") if config.pipeline.compile else nullcontext()
    with eager, Precision(config.precision).region(pipeline.device):
        return pipeline.evaluate(tokens, position_ids=positions, return_outputs=True).outputs


def _largest_change(logits: Tensor, other_logits: Tensor) -> float:
    """Return the largest change over positions, as a share of the largest logit; of each position that of most rows.

    Rounding may send a token to another expert, but hardly in two rows of three. Logits are [rows, length, vocabulary].
    """
    changes = (logits.double() - other_logits.double()).abs().amax(-1)
    return float(changes.median(0).values.max() / logits.abs().max())


def _coarsest(logits: Tensor, pipeline: Pipeline, precision: Precision) -> torch.dtype:
    """Return the type of fewest bits among the logits, the parameters and the type to compute in."""
    dtypes = {logits.dtype, precision.dtype or logits.dtype, *(parameter.dtype for parameter in pipeline.parameters())}
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


def _leaks(config: RunConfig, share: float) -> ConfigError:
    folder = config.model.transformers
    settings = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    name = next(iter(settings.get("architectures") or [settings.get("model_type")]))
    other = "" if config.data.has_chats else ", or 'windows', where documents may see each other"
    return ConfigError(
        f"{config.data.packing!r} promises that no token sees another document, but in {name} ({folder}) it does: "
        f"logits change by {100 * share:.2g} % of the largest one with the tokens of the document before. Use 'none', "
        f"one document in a sequence{other}",
        key="data.packing",
    )
