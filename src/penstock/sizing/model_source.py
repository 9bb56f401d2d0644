"""The layers of what a user calls a model: layers, or a model of transformers in any form, also without weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from penstock.errors import ConfigError, described
from penstock.hugging_face import source as sources
from penstock.hugging_face.from_transformers import from_transformers


def layers_of(model: Any) -> Sequence[Any]:
    """Return the layers of a model.

    `model` is a sequence of layers; or a folder of transformers or its name on the hub, of which only config.json is
    read, a config, or a model of transformers. Nothing is downloaded.

    Raises:
        ConfigError: it is none of these, has no layers, or cannot be cut into layers.
    """
    if isinstance(model, str | Path):
        folder = sources.folder_of(model)
        return from_transformers(sources.on_meta(model, folder))
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return from_transformers(model)
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList | nn.Sequential):
        if not hasattr(model, "main_input_name"):
            raise ConfigError(
                f"a {type(model).__name__}; expected its layers, as a list or of ps.cut, or a model of transformers",
                key="model",
            )
        return from_transformers(model)
    layers = list(model) if isinstance(model, nn.ModuleList | nn.Sequential) else model
    if not isinstance(layers, Sequence) or not len(layers):
        raise ConfigError(f"{described(layers)}; expected the layers of a model, one or more", key="model")
    return layers
