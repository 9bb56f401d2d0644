"""`ps.from_transformers`: a model of Hugging Face transformers as layers for a pipeline.

    folder, config ──► the model, parameters on meta ──► cut at its blocks, norms and heads ──► one LayerSpec for each
    model ───────────────────────────────────────────►   likewise                           ──► its own modules

Each layer runs a part of the model's own forward (`models/cutting/`), so nothing here knows any family of models.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.hugging_face import source as sources
from penstock.hugging_face.adapters import Adapter
from penstock.hugging_face.balance import Balance
from penstock.hugging_face.chains import block_lists, called_chains, layer_segments, positions_by_layer
from penstock.hugging_face.entries import DECODER_KEYWORDS, BatchEntry, DecoderEntry
from penstock.hugging_face.model import TransformersModel
from penstock.hugging_face.trial_batch import TOKENS, trial_batch
from penstock.hugging_face.undocumented import (
    LossKind,
    collect_outputs,
    collects_outputs,
    give_values,
    loss_kind,
    share_collecting_hooks,
    share_of_experts,
    tied_names,
)
from penstock.hugging_face.undocumented_peft import is_peft_model
from penstock.hugging_face.weights_in import PretrainedWeights
from penstock.models.cutting.cut import CutSpec, multiplications, segments, tensors_of_segment
from penstock.models.cutting.entry import Entry, PartCall
from penstock.models.cutting.forward import CutForward, Segment
from penstock.models.cutting.frame import Template
from penstock.models.cutting.order import CallOrder, in_order_of_calls, order_of_calls, with_points
from penstock.models.cutting.part import CutPart, part_class
from penstock.models.cutting.points import CutModel, cut_model, set_tensor, tensor_of


def from_transformers(
    source: Any,
    *,
    adapter: Any = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    seed: int = 0,
    chains: Sequence[str] | None = None,
    example: Mapping[str, Any] | None = None,
) -> TransformersModel:
    """Return a model of transformers as layers for `Pipeline`.

    `source` is a folder with config.json and safetensors files, the name of a model on the hub that is in the cache, a
    config, or a model, whose modules are used in place. A folder's weights are read when a stage is built, and each
    rank reads those of its own stages. With a config, first values depend on `seed` and the names of the layers.
    `dtype` is that of the parameters; None means that of the config. Parameters and buffers have the names of the
    transformers model.

    `adapter` is a config of peft, or a folder that peft has written, for a `source` that is no model: each rank puts
    its own part of the adapter into its stages, and trains nothing else. `source` may also be a model with an adapter
    of peft around it, or the folder of an adapter alone, whose config names its model.

    `chains` names the lists of blocks whose items may lie on different stages, by default all lists that the forward
    goes through: those of an encoder and a decoder, or of a vision tower and a language model. `example` is one batch
    as a processor makes it, for models whose forward cannot be tried with tokens or one image alone.

    Raises:
        ConfigError: transformers is missing or older than 5; there is no such folder; the model has no list of blocks,
            or settings that a pipeline cannot run; `chains` are not there; an `example` is needed; peft is missing, or
            the adapter is none that a pipeline trains.
        CheckpointError: the folder has no weights that can be read, or those of another model or adapter.
    """
    if isinstance(source, nn.Module):
        return _in_place(source, adapter, chains, example)
    source, adapter = sources.base_and_adapter(source, adapter)
    folder = sources.folder_of(source)
    plain = sources.on_meta(source, folder, dtype, attn_implementation)
    weights = None if folder is None else PretrainedWeights.open(folder, plain)
    put_in = None if adapter is None else Adapter.on(plain, adapter)
    model = plain if put_in is None else put_in.model
    plan = _planned(model, block_lists(model, chains), example, is_default=chains is None)
    base_names = {} if put_in is None else put_in.base_names
    # Saved buffers around the points: the forward of every stage computes with them.
    for name in plan.cut.tensors:
        base_name = base_names.get(name, name)
        if weights is not None and base_name in weights and not isinstance(tensor_of(model, name), nn.Parameter):
            set_tensor(model, name, weights.read(base_name).to(tensor_of(model, name).dtype))
    # Each layer runs the model's own forward between two points. It is a recipe, which a rank builds.
    make_parts, weight = _part_constructors(model, plan), _relative_weights(plain, plan)
    present_names = {base_name: name for name, base_name in base_names.items()}
    ties = {present_names.get(name, name): present_names.get(owner, owner) for name, owner in tied_names(plain).items()}
    specs = []
    for name, segment in plan.segments.items():
        local_names = _tensor_names(model, segment)
        specs.append(
            CutSpec(
                name,
                partial(_build_part, make_parts[name], plain, segment, weights, put_in),
                seed=seed,
                weight=weight(name),
                tied=tuple((alias, owner_name) for alias, owner_name in ties.items() if alias in local_names),
                has_full_names=True,
                batch_signature=plan.entry.batch_signature,
            )
        )
    return TransformersModel(specs, model, folder, is_decoder=_is_decoder(model), adapter=put_in)


def _in_place(source: nn.Module, adapter: Any, chains: Sequence[str] | None, example: Any) -> TransformersModel:
    """Return the modules of a model as layers; a model with an adapter around it is used with the adapter."""
    if adapter is not None:
        raise ConfigError(
            "the source is a model, whose modules are used in place; pass get_peft_model(model, config) alone, or a "
            "folder or config of the model with adapter=",
            key="adapter",
        )
    sources.transformers()
    put_in = Adapter.around(source) if is_peft_model(source) else None
    model = sources.checked(source if put_in is None else put_in.model)
    plan = _planned(model, block_lists(model, chains), example, is_default=chains is None)
    make_parts, weight = _part_constructors(model, plan), _relative_weights(model, plan)
    layers = [make_parts[name](*tensors_of_segment(model, segment)) for name, segment in plan.segments.items()]
    for layer in layers:
        layer.layer_weight = weight(layer.layer_name)
        if put_in is not None:
            put_in.mark(layer)
    return TransformersModel(layers, model, None, is_decoder=_is_decoder(model), adapter=put_in)


def _relative_weights(model: Any, plan: "_Plan") -> Callable[[str], float]:
    """Return what says how much a layer computes, by its name, relative to the first block of the last chain."""
    expert_share = share_of_experts(model.config)
    block_weight = multiplications(model.get_submodule(plan.block), expert_share) or 1.0

    def weight(name: str) -> float:
        modules, _ = tensors_of_segment(model, plan.segments[name])
        number = sum(multiplications(item, expert_share) for item in modules.values())
        return number * plan.positions[name] / block_weight

    return weight


def _tensor_names(model: Any, segment: Segment) -> set[str]:
    """Return the names of a layer's tensors, also the second name of what a module ties within itself."""
    modules, tensors = tensors_of_segment(model, segment)
    names = {*tensors}
    for path, module in modules.items():
        names |= {f"{path}.{item}" for item, _ in module.named_parameters(remove_duplicate=False)}
    return names


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a model is cut, and how its stages call its forward."""

    cut: CutModel
    entry: Entry
    segments: dict[str, Segment]
    """What each layer runs, by the name of the layer."""
    positions: dict[str, float]
    """How many positions each layer works on, relative to the last chain."""
    block: str
    """The first block of the last chain; the weights of layers are relative to its own."""


def _planned(model: Any, lists: list[str], example: Mapping[str, Any] | None, *, is_default: bool) -> _Plan:
    """Cut a model at the items of these lists, in the order in which a run without values calls them.

    Raises: ConfigError, where the run fails, or does not come to all lists.
    """
    cut = cut_model(model, [f"{name}.*" for name in lists])
    blocks = [name for name in cut.points if any(name.startswith(f"{each}.") for each in lists)]
    entry, order = _tried_entry(model, with_points(cut, blocks), example)
    missing = [name for name in blocks if name not in order.names]
    repeated = [name for name in blocks if name in order.repeated_names]
    if order.error is not None or repeated or (missing and (example is None or len(missing) == len(blocks))):
        absent = [name for name in entry.batch_signature.parameters if name not in (example or {})]
        raise _unlike_chains(model, order, missing[:1], repeated[:1], absent=None if example is None else absent)
    called_lists = [name for name in lists if any(called.startswith(f"{name}.") for called in order.names)]
    if called_lists != lists:  # the others stay whole, in modules that run before the first block
        return _planned(model, called_lists, example, is_default=is_default)
    chains = called_chains(lists, order, is_default=is_default)
    cut = in_order_of_calls(cut, blocks, order)
    layers = layer_segments(segments(cut), chains)
    block = next(name for name in cut.points if name.startswith(f"{chains[-1]}."))
    return _Plan(cut, entry, layers, positions_by_layer(layers, chains, order), block)


def _tried_entry(model: Any, cut: CutModel, example: Mapping[str, Any] | None) -> tuple[Entry, CallOrder]:
    """Return how stages call the forward, and the order in which it calls submodules.

    Stages of a decoder behind the first one are given no tokens, where its forward does not decide by their values.
    """
    batch_entry = BatchEntry(model)
    batch = trial_batch(model, example, batch_entry.batch_signature)
    if _is_decoder(model) and TOKENS in batch and batch.keys() <= {TOKENS, *DECODER_KEYWORDS}:
        entry = DecoderEntry(model)
        keywords = {name: value for name, value in batch.items() if name != TOKENS}
        order = _order(model, cut, entry, PartCall((batch[TOKENS],), keywords, is_first=True))
        if order.error is None:
            return entry, order
    order = _order(model, cut, batch_entry, PartCall((), batch, is_first=True))
    return BatchEntry(model, _block_by_keyword(model, cut, batch_entry, batch, order), tuple(batch)), order


def _block_by_keyword(
    model: Any, cut: CutModel, entry: Entry, batch: Mapping[str, Any], order: CallOrder
) -> dict[str, str]:
    """Return the keywords of a batch without which the forward leaves out blocks, with the first of these blocks."""
    block_by_keyword: dict[str, str] = {}
    for keyword in batch if order.error is None else ():
        further = {name: value for name, value in batch.items() if name != keyword}
        order_without = _order(model, cut, entry, PartCall((), further, is_first=True))
        left_out = [name for name in order.names if name in cut.points and name not in order_without.names]
        if left_out and order_without.error is None:
            block_by_keyword[keyword] = left_out[0]
    return block_by_keyword


def _is_decoder(model: Any) -> bool:
    """Whether a model is a causal decoder of one list of blocks."""
    return loss_kind(model) is LossKind.SHIFTED and len(block_lists(model)) == 1


def _order(model: Any, cut: CutModel, entry: Entry, batch: PartCall) -> CallOrder:
    """Run the forward without values; where it collects outputs of submodules, the model gets the hooks for that."""
    frames: list[nn.Module] = []

    def complete(frame: nn.Module, device: torch.device) -> None:
        share_collecting_hooks(frame, device)
        frames.append(frame)

    order = order_of_calls(Template(model, cut, complete), entry, batch)
    if collects_outputs(frames[0]) and not collects_outputs(model):
        collect_outputs(model)
        order = order_of_calls(Template(model, cut, complete), entry, batch)
    return order


def _unlike_chains(
    model: Any, order: CallOrder, missing: list[str], repeated: list[str], *, absent: list[str] | None
) -> ConfigError:
    """Return what to tell a user where a run failed, did not come to all blocks, or came to one twice.

    `absent` names the arguments that an example does not have; it is None where there is no example.
    """
    model_name = type(model).__name__
    if repeated:
        return ConfigError(
            f"{model_name} calls {repeated[0]!r} again in the same forward, but a pipeline runs each block once for a "
            "microbatch; leave this list of blocks alone, by chains= with the names of others",
            key="chains",
        )
    reason = f"does not come to {missing[0]!r}" if missing else ""
    if order.error is not None:
        reason = f"fails: {type(order.error).__name__}: {order.error}"
    example_words, fix = "a made-up batch", "Pass example=, one batch as the processor makes it"
    if absent is not None:
        example_words, fix = "the example", f"Pass an example with all that it needs (absent: {', '.join(absent)})"
    return ConfigError(
        f"a trial run of {model_name} with {example_words} {reason}. {fix}, or name the lists of blocks to be cut at "
        "by chains=",
        key="example",
    )


def _part_constructors(model: Any, plan: _Plan) -> dict[str, Callable[..., CutPart]]:
    """Return what makes each layer of its tensors, by name; blocks and the last layer balance experts, if asked to."""
    forward = CutForward(Template(model, plan.cut, share_collecting_hooks), plan.entry)
    kind, names = part_class(plan.entry.batch_signature), list(plan.segments)
    is_balanced = getattr(model.config, "output_router_logits", False)
    kinds = Balance(model, names).kinds(kind, names) if is_balanced else dict.fromkeys(names, kind)
    return {name: partial(kinds[name], forward, name, segment) for name, segment in plan.segments.items()}


def _build_part(
    make: Callable[..., CutPart],
    model: Any,
    segment: Segment,
    weights: PretrainedWeights | None,
    adapter: Adapter | None,
) -> CutPart:
    """Build one layer on the default device, with values from files or drawn, and with its part of an adapter."""
    part = _build_plain_part(make, model, segment, weights)
    if adapter is not None:
        adapter.put_into(part)
    return part


def _build_plain_part(
    make: Callable[..., CutPart], model: Any, segment: Segment, weights: PretrainedWeights | None
) -> CutPart:
    device = torch.get_default_device()
    configs = (getattr(module, "config", None) for module in model.modules())
    memo: dict[int, Any] = {id(config): config for config in configs}  # all layers share the configs of the model
    inputs = tensors_of_segment(model, segment)
    if device.type != "meta":  # one memo for all of the layer: what shares a parameter goes on to share it
        memo |= {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            for parameter in make(*inputs).parameters()
        }
    modules, tensors = copy.deepcopy(inputs, memo)
    part = make(modules, tensors).to(device)
    if device.type == "meta":
        return part
    for module in modules.values():
        give_values(model, [item for item in module.modules() if weights is None or _lacks(weights, part, item)])
    if weights is not None:
        weights.fill(part)
    return part


def _lacks(weights: PretrainedWeights, part: CutPart, module: nn.Module) -> bool:
    """Whether files have no value for a parameter that a submodule of a layer holds itself, as of fixed positions."""
    ids = {id(parameter) for parameter in module.parameters(recurse=False)}
    return any(name not in weights for name, parameter in part.named_parameters() if id(parameter) in ids)
