"""Uses of transformers that its documentation does not promise: first values, routers, and tensors of files.

Each function has a test in tests/hugging_face/test_undocumented.py that says which fact changed.

    file                                            model
    layers.0.block_sparse_moe.experts.0.w1.weight ┐
    layers.0.block_sparse_moe.experts.1.w1.weight ├─► model.layers.0.mlp.experts.gate_up_proj
    ...                                           ┘   a `Conversion`: sources, and the converter of transformers
"""

import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True, eq=False)
class Conversion:
    """Tensors of files that become one tensor of the model, or several."""

    first: str
    """The target by which transformers calls it."""
    converter: Any = None
    """Of transformers; None where the source is the target."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Name in the files, and the converter's pattern that it matched; in the order in which tensors are joined."""

    def convert(self, tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Return the targets by name; `tensors`, the sources by name, is emptied, so that each is freed early.

        Raises: Exception, of any type, where the sources do not fit together.
        """
        if self.converter is None:
            return {self.first: tensors.pop(self.sources[0][0])}
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.first, name, pattern, tensors.pop(name))
        return _flat(converter.convert(self.first, model=model, config=model.config))


def conversions(model: Any, names: Iterable[str]) -> tuple[list[Conversion], dict[str, str]]:
    """Return how the tensors of files become those of a model, and the tensors of files that become none.

    `names` are the tensors in the files. transformers has rules by which older names are renamed, and tensors are
    joined or split, as experts are. A tensor that becomes none comes with the name that the model would have to have
    for it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    conversion_by_target: dict[str, Conversion] = {}
    unknown_targets: dict[str, str] = {}
    # Experts are joined in this order, and some rules wait for a name that comes first in it.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # files that transformers 5 wrote without its rules
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target not in state:
            unknown_targets[name] = target
            continue
        conversion = conversion_by_target.setdefault(
            target, Conversion(target, None if pattern is None else converter_of_pattern[pattern])
        )
        conversion.sources.append((name, pattern or name))
    return list(conversion_by_target.values()), unknown_targets


def reverted(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what files hold for some tensors of a model, by their names in files.

    Names that share a file's tensor must be given together: else only a part of it comes back.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return _flat(revert_weight_conversion(model, dict(tensors)))


def tied_names(model: Any) -> dict[str, str]:
    """Return every tied parameter with the one that it is tied to."""
    return dict(model.all_tied_weights_keys)


def unsaved_names(model: Any) -> frozenset[str]:
    """Return the parameters and buffers that transformers leaves out of files, those that are tied apart."""
    return frozenset(model._keys_to_ignore_on_save or ())


def missing_and_strange(model: Any, missing: Collection[str], strange: Collection[str]) -> tuple[set[str], set[str]]:
    """Return which of these names transformers complains about: others may be missing, or are of no use."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(strange))
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def is_quantized(model: Any) -> bool:
    """Whether the files hold quantized weights, which a quantizer of transformers reads."""
    return getattr(model.config, "quantization_config", None) is not None


def _flat(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name, where an operation of transformers may leave a list of one."""
    with torch.no_grad():
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def give_values(model: Any, module: nn.Module, device: torch.device) -> None:
    """Give first values to a module that was on the meta device, by the rules of its model.

    Of a `PreTrainedModel`, `_init_weights(module)` draws the parameters of one module, and makes its buffers that are
    not saved, such as the frequencies of rotary embeddings.
    """
    module.to_empty(device=device)
    for part in reversed(list(module.modules())):
        model._init_weights(part)


def make_unsaved_buffers(model: Any, root: nn.Module, device: torch.device) -> None:
    """Make the buffers anew that no file has, wherever they are on the meta device."""
    for part in root.modules():
        buffers = dict(part.named_buffers(recurse=False))
        if buffers and any(tensor.is_meta for tensor in buffers.values()):
            part.to_empty(device=device, recurse=False)
            with torch.no_grad():
                model._init_weights(part)


def device_map_of(model: Any) -> Any:
    """Return on which device each module of a model was placed, if accelerate did: `hf_device_map`."""
    return getattr(model, "hf_device_map", None)


def router_class(model: Any) -> type[nn.Module] | None:
    """Return the class of the modules whose first output is a router's logits: `_can_record_outputs`."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router = getattr(recorder, "target_class", recorder)
    return router if isinstance(router, type) and getattr(recorder, "index", 0) == 0 else None


def computes_own_loss(model: Any) -> bool:
    """Whether a class of transformers computes its loss itself: not shifted, and a mean of each microbatch alone.

    All others call `self.loss_function(logits, labels, ...)` in their forward.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    is_theirs = type(model).__module__.startswith("transformers.")
    return is_theirs and code is not None and "loss_function" not in code.co_names


def pools_by_tokens(model: Any) -> bool:
    """Whether a class of transformers takes the output at the last token of each row that is no padding.

    Sequence classifiers look for the last one that is not `config.pad_token_id` behind the blocks, by an argmax.
    """
    forward = inspect.unwrap(type(model).forward)
    code, is_theirs = getattr(forward, "__code__", None), forward.__module__.startswith("transformers.")
    return is_theirs and code is not None and {"pad_token_id", "argmax"} <= set(code.co_names)


def has_balance_loss(model: Any) -> bool:
    """Whether the file of a model has `load_balancing_loss_func`, which its forward adds to the loss."""
    return hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
