"""How a stage calls the forward of a model of transformers, and what of its output the last stage returns."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.hugging_face.trial_batch import TOKENS
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
        self._settings = _settings(model)

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
        self._settings = _settings(model)

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        inputs = part_call.inputs if part_call.is_first else ()
        _, batch = self.batch_signature.bind(inputs, part_call.keywords)
        return output_of(model(**batch, **self._settings))


def output_of(output: Any) -> Any:
    """Return the logits of an output, else the last hidden state, else the output as it is."""
    if not isinstance(output, Mapping):
        return output
    return output.get("logits", output.get("last_hidden_state", output))


def _is_of_batch(name: str) -> bool:
    return name not in NO_BATCH and not name.startswith(NO_BATCH_PREFIXES)


def _settings(model: Any) -> dict[str, Any]:
    """Return the settings with which a forward is called, as far as it takes them."""
    parameters = inspect.signature(model.forward).parameters
    # With a cache, transformers no longer sees where packed sequences end. The loss that balances experts is made of
    # results of the blocks (balance.py), not in the model's forward.
    wanted = {"use_cache": False, "return_dict": True, "output_router_logits": False}
    passed_on = set()
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):  # it hands them to the model that it holds
        has_cache = model.can_generate() or hasattr(model.config, "use_cache")
        passed_on = {"return_dict", "use_cache"} if has_cache else {"return_dict"}
    return {name: value for name, value in wanted.items() if name in parameters or name in passed_on}
