"""Caches of transformers of which every rank fills a part: its documentation does not promise what is in them.

Each fact has a test in tests/hugging_face/test_undocumented_caches.py.

    DynamicCache of one process       layers 0 1 2 3   filled one after another; the forward asks layer 0 for its length
    on the rank of blocks 2 and 3     layers - - 2 3   the same question has the same answer, from `seen`
"""

import inspect
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.models.cutting.part_state import PartState

CACHE_ARGUMENTS = ("past_key_values", "cache_params")
"""The names of the arguments by which forwards take a cache."""


class RankCache(PartState):
    """A cache of transformers for one microbatch, of which a rank fills the layers that it has.

    It is a `DynamicCache` too (`rank_cache`). The ruler is a second cache, which has read as many tokens without
    values: it answers all questions for lengths, whether or not a layer is filled here.
    """

    layers: list[Any]

    def __init__(self, config: Any, seen: int = 0, ruler: Any = None) -> None:
        super().__init__(config=config)  # type: ignore[call-arg]
        self.config, self.seen = config, seen
        self.ruler = _ruler(config) if ruler is None else ruler

    @property
    def common(self) -> Hashable:
        return self.seen

    def without_values(self) -> Any:
        return _with_dynamic_cache(_BareCache)(self.config, self.seen, self.ruler)

    # ---- what forwards ask

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length before this forward, also while layers are filled."""
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length and offset of the keys of a layer."""
        sizes: tuple[int, int] = self.ruler.get_mask_sizes(query_length, layer_idx)
        return sizes

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer with a recurrent state has one; of no layer in particular, whether all have."""
        if layer_idx is None:
            return self.seen > 0
        return bool(super().has_previous_state(layer_idx, state_idx))  # type: ignore[misc]

    # ---- between two forwards

    def advance(self, length: int) -> None:
        """Note that a forward has read `length` further tokens."""
        self.seen += length
        # Not within a forward, where operators of the ruler would be taken for the model's.
        bare = torch.empty(1, 1, length, 1, device="meta")
        for layer in dict.fromkeys(self.ruler.layers):
            if hasattr(layer, "get_seq_length"):  # it is one of attention
                layer.update(bare, bare)

    def release(self) -> None:
        """Let go of all tensors."""
        self.layers.clear()

    def expected_layers(self) -> list[int]:
        """Return the layers that some rank has to fill."""
        return [index for index, layer in enumerate(self.layers) if type(layer).__name__ != "DummyLayer"]

    def filled_layers(self) -> list[int]:
        """Return the layers that hold what the tokens read so far have left."""
        return [index for index in self.expected_layers() if self._is_filled(self.layers[index])]

    def _is_filled(self, layer: Any) -> bool:
        has_states = all(getattr(layer, "has_previous_state", {}).values())
        return has_states and (not hasattr(layer, "get_seq_length") or layer.get_seq_length() == self.seen)


class _BareCache(RankCache):
    """A cache for blocks that run without values: what it returns has the shapes that a full one would have."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        update: Any = super().update  # type: ignore[misc]
        earlier_states = (
            states.new_zeros(*states.shape[:-2], self.seen, states.shape[-1]) for states in (key_states, value_states)
        )
        update(*earlier_states, layer_idx)
        return update(key_states, value_states, layer_idx, *args, **kwargs)


def rank_cache(config: Any) -> RankCache:
    """Return an empty cache for a model of this config."""
    empty_cache: RankCache = _with_dynamic_cache(RankCache)(config)
    return empty_cache


@cache
def _with_dynamic_cache(kind: type) -> Any:
    """Return a class that is a `DynamicCache` of transformers too, for forwards that ask isinstance()."""
    from transformers import DynamicCache

    return type(kind.__name__, (kind, DynamicCache), {"__module__": kind.__module__})


def _ruler(config: Any) -> Any:
    """Return a cache in which layers of one kind are one layer, since they have one length."""
    from transformers import DynamicCache

    ruler: Any = DynamicCache(config=config)
    layer_by_kind: dict[Any, Any] = {}
    ruler.layers = [
        layer_by_kind.setdefault((type(layer), getattr(layer, "sliding_window", None)), layer) for layer in ruler.layers
    ]
    return ruler


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which the forward of a model takes a cache; empty where it takes none."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    named = next((name for name in CACHE_ARGUMENTS if name in parameters), "")
    return named or (CACHE_ARGUMENTS[0] if takes_any else "")


def takes_dynamic_cache(model: Any) -> bool:
    """Return whether a model of transformers takes a `DynamicCache`, and no cache of a class of its own, as MiniMax."""
    takes: Any = getattr(model, "_supports_default_dynamic_cache", None)
    return takes is None or bool(takes())


def longest_text(config: Any) -> int:
    """Return how many positions a model has; 0 where its config does not say."""
    return int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)


def unstretched_text(config: Any) -> int:
    """Return how many positions a model rotates by its factors for short texts (longrope); 0 where it has one set.

    Beyond them a forward writes other factors, and what a cache has was rotated by the first ones.
    """
    config = config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [item for item in parameters.values() if isinstance(item, dict)] or [parameters]
    lengths = [
        item.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0)
        for item in by_kind
        if item.get("rope_type") == "longrope"
    ]
    return min(map(int, filter(None, lengths)), default=0)


def inputs_of_forward(model: Any, text: Tensor, mask: Tensor, kept: RankCache) -> dict[str, Any]:
    """Return what `generate` of transformers passes to a forward that reads the end of some rows.

    `text` and `mask` are all tokens so far, [rows, length], of which the cache has seen the first ones. The tokens that
    the forward reads, `input_ids`, are left out.
    """
    parameters = inspect.signature(model.forward).parameters
    further: dict[str, Any] = {cache_argument(model): kept, "use_cache": True}
    if "position_ids" in parameters:
        further["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    if "logits_to_keep" in parameters:
        further["logits_to_keep"] = 1
    length, is_first = text.shape[1] - kept.seen, not kept.seen
    if not mask.all():
        further["attention_mask"] = mask
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        text, next_sequence_length=length, is_first_iteration=is_first, **further
    )
    del inputs["input_ids"]
    return inputs
