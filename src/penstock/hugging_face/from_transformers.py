"""`ps.from_transformers`: a causal language model of Hugging Face transformers as layers for a pipeline.

    folder, config ──► the model on the meta device ──► cut at its blocks, norm and head ──► one LayerSpec for each
    model ──────────────────────────────────────────►   likewise                         ──► its own modules

Each layer runs a part of the model's own forward (`models/cutting/`), so nothing here knows any family of models.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.hugging_face import source as sources
from penstock.hugging_face.balance import Balance
from penstock.hugging_face.model import TransformersModel
from penstock.hugging_face.undocumented import give_values, make_unsaved_buffers, tied_names
from penstock.hugging_face.weights_in import PretrainedWeights
from penstock.models.cutting.batch_signature import BatchSignature
from penstock.models.cutting.cut import CutSpec, multiplications, segments, tensors_of_segment
from penstock.models.cutting.entry import PartCall
from penstock.models.cutting.forward import CutForward, Segment
from penstock.models.cutting.frame import Template
from penstock.models.cutting.order import in_order_of_calls
from penstock.models.cutting.part import CutPart, part_class
from penstock.models.cutting.points import cut_model
from penstock.models.cutting.trees import tensors_in

TOKENS = "input_ids"
"""The argument that only the first stage needs."""
KEYWORDS = ("attention_mask", "position_ids", "token_type_ids")
"""The keywords that a batch may have beside tokens, where the model takes them."""


def from_transformers(
    source: Any, *, dtype: torch.dtype | None = None, attn_implementation: str | None = None, seed: int = 0
) -> TransformersModel:
    """Return a causal language model of transformers as layers for `Pipeline`.

    `source` is a folder with config.json and safetensors files, the name of a model on the hub that is in the cache, a
    config, or a model, whose modules are used in place. A folder's weights are read when a stage is built, and each
    rank reads those of its own stages. With a config, first values depend on `seed` and the names of the layers.
    `dtype` is that of the parameters; None means that of the config. Parameters and buffers have the names of the
    transformers model.

    Raises:
        ConfigError: transformers is missing or older than 5; there is no such folder; the model is no decoder, or has
            settings that a pipeline cannot run.
        CheckpointError: the folder has no weights that can be read, or those of another model.
    """
    if isinstance(source, nn.Module):
        sources.transformers()
        model, folder = sources.checked(source), None
    else:
        folder = sources.folder_of(source)
        model = sources.on_meta(source, folder, dtype, attn_implementation)
    # Cut the model at its blocks, and put the points into the order in which a run without values calls them.
    blocks = sources.blocks_of(model)
    entry, complete = _Entry(model), partial(make_unsaved_buffers, model)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    trial_batch = PartCall((tokens,), {}, is_first=True)
    cut = in_order_of_calls(model, cut_model(model, [f"{blocks}.*"]), f"{blocks}.", complete, entry, trial_batch)
    # Each layer runs the model's own forward between two points.
    forward = CutForward(Template(model, cut, complete), entry)
    parts = segments(cut, [name for name in cut.points if name.startswith(f"{blocks}.")][-1])
    constructors = _part_constructors(model, part_class(entry.batch_signature), list(parts))
    expert_share = _share_of_experts(model.config)
    block_weight = multiplications(model.get_submodule(f"{blocks}.0"), expert_share)
    # A model with values is used in place; otherwise each layer is a recipe, which a rank builds.
    if model is source:
        layers = [
            constructors[name](forward, name, segment, *tensors_of_segment(model, segment))
            for name, segment in parts.items()
        ]
        for layer in layers:
            layer.layer_weight = multiplications(layer, expert_share) / block_weight
        return TransformersModel(layers, model, None)
    weights = None if folder is None else PretrainedWeights.open(folder, model)
    ties = tied_names(model)
    specs = []
    for name, segment in parts.items():
        modules, tensors = tensors_of_segment(model, segment)
        parameters = (f"{path}.{item}" for path, module in modules.items() for item, _ in module.named_parameters())
        local_names = {*tensors, *parameters}
        specs.append(
            CutSpec(
                name,
                partial(_build_part, partial(constructors[name], forward, name, segment), model, segment, weights),
                seed=seed,
                weight=sum(multiplications(module, expert_share) for module in modules.values()) / block_weight,
                tied=tuple((name, owner_name) for name, owner_name in ties.items() if name in local_names),
                has_full_names=True,
                batch_signature=entry.batch_signature,
            )
        )
    return TransformersModel(specs, model, folder)


def _part_constructors(model: Any, kind: type[CutPart], names: list[str]) -> dict[str, Callable[..., CutPart]]:
    """Return the constructor of each layer, by name; with experts to be balanced, blocks and the last layer do it."""
    if not getattr(model.config, "output_router_logits", False):
        return dict.fromkeys(names, kind)
    return Balance(model, names).kinds(kind, names)


def _build_part(
    make: Callable[..., CutPart], model: Any, segment: Segment, weights: PretrainedWeights | None
) -> CutPart:
    """Build one layer on the default device, with values from files or drawn."""
    device = torch.get_default_device()
    modules, tensors = tensors_of_segment(model, segment)
    shared: dict[int, Any] = {id(model.config): model.config}
    modules = {name: copy.deepcopy(module, dict(shared)) for name, module in modules.items()}
    part = make(modules, copy.deepcopy(tensors))
    if device.type == "meta":
        return part
    if weights is None:
        for module in modules.values():
            give_values(model, module, device)
        return part
    make_unsaved_buffers(model, part, device)
    for module in part.modules():
        if any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
    weights.fill(part)
    return part


def _share_of_experts(config: Any) -> float:
    """Return the fraction of a layer's experts that a token is sent to."""
    num_experts = next((getattr(config, name) for name in EXPERTS if getattr(config, name, None)), 1)
    return float(getattr(config, "num_experts_per_tok", num_experts) / num_experts)


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The names that configs have for the number of experts of a layer."""


class _Entry:
    """How a stage calls the forward of the whole model: with tokens, which the first stage alone is given."""

    def __init__(self, model: Any) -> None:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
        self.batch_signature = BatchSignature(model, (TOKENS, *KEYWORDS), first=(TOKENS,))
        # The loss that balances experts is made of results of the blocks (balance.py), not in the model's forward.
        self._quiet = {"output_router_logits": False} if "output_router_logits" in parameters else {}

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        if part_call.is_first:
            (tokens,) = part_call.inputs
        else:
            hidden = next(iter(tensors_in(part_call.inputs)))
            tokens = torch.empty(hidden.shape[:2], dtype=torch.int64, device="meta")
        batch = {TOKENS: part_call.batch_leaf(TOKENS, tokens)}
        # With a cache, transformers no longer sees where packed sequences end.
        return model(**batch, **part_call.keywords, use_cache=False, return_dict=True, **self._quiet).logits
