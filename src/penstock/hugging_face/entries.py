"""How a stage calls the forward of a model of transformers, and what of its output the last stage returns."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.hugging_face.cached_rows import CACHED_ROWS, with_cache
from penstock.hugging_face.trial_batch import TOKENS
from penstock.hugging_face.undocumented import forward_settings, output_of
from penstock.models.cutting.batch_signature import BatchSignature
from penstock.models.cutting.entry import PartCall
from penstock.models.cutting.trees import tensors_in

DECODER_KEYWORDS = ("attention_mask", "position_ids", "token_type_ids")
"""The keywords that a batch of a decoder may have beside tokens, where the model takes them."""
NO_BATCH = ("labels", "use_cache", "past_key_values", "encoder_outputs", "logits_to_keep", "cache_position")
NO_BATCH_PREFIXES = ("output_", "return_")
"""The arguments of a forward that no batch has: settings, caches and labels, which go to the loss of a pipeline."""


class DecoderEntry:
    """The entry of a decoder: tokens by position, which the first stage alone is given."""

    ends_by_position = True
    """Whether what runs behind the last block treats each position alone: norm, head and cap do."""

    def __init__(self, model: Any) -> None:
        names = (TOKENS, *DECODER_KEYWORDS)
        self.batch_signature = BatchSignature(model, names, first=(TOKENS,), of_entry=(CACHED_ROWS,))
        self._settings = forward_settings(model)

    def example_keywords(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return keywords of a batch for a hidden state [1, positions, width], whose first position is padding."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        values = {"attention_mask": positions.clamp(max=1), "position_ids": positions}
        return {name: value for name, value in values.items() if name in self.batch_signature.parameters}

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        if part_call.is_first:
            (tokens,) = part_call.inputs
        else:
            hidden = next(iter(tensors_in(part_call.inputs)))
            tokens = torch.empty(hidden.shape[:2], dtype=torch.int64, device="meta")
        batch = {TOKENS: part_call.batch_leaf(TOKENS, tokens)}
        return output_of(model(**batch, **with_cache(self._settings, part_call.keywords)))


class BatchEntry:
    """The entry of all other models: every stage gets the whole batch by the names of the forward's arguments."""

    def __init__(
        self, model: Any, block_by_keyword: Mapping[str, str] | None = None, tried: Collection[str] = ()
    ) -> None:
        """`block_by_keyword` says of keywords of a batch which block the forward leaves out without them.

        `tried` are the keywords of a batch with which the forward was tried.
        """
        names = [name for name in inspect.signature(model.forward).parameters if _is_of_batch(name)]
        self.batch_signature: BatchSignature = WholeBatchSignature(model, names, block_by_keyword or {})
        self._settings = forward_settings(model)
        self._tried = tried

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        inputs = part_call.inputs if part_call.is_first else ()
        _, batch = self.batch_signature.bind(inputs, part_call.keywords)
        try:
            return output_of(model(**with_cache(self._settings, batch)))
        except PenstockError:
            raise
        except Exception as error:
            absent = [repr(name) for name in self._tried if batch.get(name) is None]
            if not absent:
                raise
            raise PenstockError(
                f"the batch has no {', '.join(absent)}, which the batch had with which the model was tried, and the "
                f"forward of {type(model).__name__} fails: {type(error).__name__}: {error}. Give it what is absent"
            ) from error


class WholeBatchSignature(BatchSignature):
    """The arguments of a forward that calls some blocks only if its batch has certain keywords, as those of images."""

    def __init__(self, model: nn.Module, names: Sequence[str], block_by_keyword: Mapping[str, str]) -> None:
        super().__init__(model, names, of_entry=(CACHED_ROWS,))
        self._block_by_keyword = block_by_keyword

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_first: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a batch as a layer takes it.

        Raises:
            PenstockError: an argument is missing, also one without which a block is left out; or as every signature.
        """
        positional, batch = super().bind(args, kwargs, is_first=is_first)
        for name, block in self._block_by_keyword.items():
            if batch.get(name) is None:
                raise PenstockError(
                    f"the batch has no {name!r}, without which the forward of {self._model} leaves out {block!r}, but "
                    f"each block runs in every microbatch; give all batches {name!r}, or leave the list of this block "
                    "whole, by chains= with the names of the others"
                )
        return positional, batch


def _is_of_batch(name: str) -> bool:
    return name not in NO_BATCH and not name.startswith(NO_BATCH_PREFIXES)
