"""How a stage calls the forward of a model of transformers, and what of its output the last stage returns."""

import inspect
from typing import Any

import torch
from torch import nn

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

    def __init__(self, model: Any) -> None:
        self.batch_signature = BatchSignature(model, (TOKENS, *DECODER_KEYWORDS), first=(TOKENS,))
        self._settings = forward_settings(model)

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        if part_call.is_first:
            (tokens,) = part_call.inputs
        else:
            hidden = next(iter(tensors_in(part_call.inputs)))
            tokens = torch.empty(hidden.shape[:2], dtype=torch.int64, device="meta")
        batch = {TOKENS: part_call.batch_leaf(TOKENS, tokens)}
        return output_of(model(**batch, **part_call.keywords, **self._settings))


class BatchEntry:
    """The entry of all other models: every stage gets the whole batch by the names of the forward's arguments."""

    def __init__(self, model: Any) -> None:
        names = [name for name in inspect.signature(model.forward).parameters if _is_of_batch(name)]
        self.batch_signature = BatchSignature(model, names)
        self._settings = forward_settings(model)

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        inputs = part_call.inputs if part_call.is_first else ()
        _, batch = self.batch_signature.bind(inputs, part_call.keywords)
        return output_of(model(**batch, **self._settings))


def _is_of_batch(name: str) -> bool:
    return name not in NO_BATCH and not name.startswith(NO_BATCH_PREFIXES)
