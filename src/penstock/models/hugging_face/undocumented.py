"""What transformers has and its documentation does not promise; each fact has a canary in the test of this file."""

import sys
from typing import Any

import torch
from torch import nn


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
        own = dict(part.named_buffers(recurse=False))
        if own and any(tensor.is_meta for tensor in own.values()):
            part.to_empty(device=device, recurse=False)
            with torch.no_grad():
                model._init_weights(part)


def tied_names(model: Any) -> dict[str, str]:
    """Return, by name of a parameter that is tied, the name of the one that files have: `all_tied_weights_keys`."""
    return dict(model.all_tied_weights_keys)


def device_map_of(model: Any) -> Any:
    """Return on which device each module of a model was placed, if accelerate did: `hf_device_map`."""
    return getattr(model, "hf_device_map", None)


def router_class(model: Any) -> type[nn.Module] | None:
    """Return the class of the modules whose first output is a router's logits: `_can_record_outputs`."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    found = getattr(recorder, "target_class", recorder)
    return found if isinstance(found, type) and getattr(recorder, "index", 0) == 0 else None


def has_balance_loss(model: Any) -> bool:
    """Whether the file of a model has `load_balancing_loss_func`, which its forward adds to the loss."""
    return hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
