"""The batch of a trial run, by which the order of a model's calls is found: the caller's, or one made of the config."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, described
from penstock.models.cutting.batch_signature import BatchSignature
from penstock.models.cutting.trees import map_tensors

NUM_TOKENS = 8
TOKENS, DECODER_TOKENS, PIXELS = "input_ids", "decoder_input_ids", "pixel_values"


def trial_batch(model: Any, example: Mapping[str, Any] | None, signature: BatchSignature) -> dict[str, Any]:
    """Return a batch by the names of the forward's arguments; `example` is one as a processor makes it.

    Without one, tokens are made, or the pixels of an image where these are the model's main input.

    Raises:
        ConfigError: the example has no argument of the forward, or one is needed.
    """
    if example is not None:
        return _checked_example(model, example, signature)
    main_input = model.main_input_name
    if main_input == TOKENS:
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
        return {TOKENS: tokens, **({DECODER_TOKENS: tokens.clone()} if model.config.is_encoder_decoder else {})}
    config = getattr(model.config, "vision_config", model.config)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if main_input != PIXELS or size is None or channels is None:
        raise ConfigError(
            f"{type(model).__name__} takes {main_input!r}, of which its config does not say the shape; pass "
            "example=, one batch as its processor makes it",
            key="example",
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {PIXELS: torch.zeros(1, channels, height, width, dtype=model.dtype)}


def _checked_example(model: Any, example: Mapping[str, Any], signature: BatchSignature) -> dict[str, Any]:
    if not isinstance(example, Mapping):
        raise ConfigError(f"{described(example)}; expected a dict, one batch as the processor makes it", key="example")
    batch = {name: value for name, value in example.items() if name in signature.parameters}
    if not any(isinstance(value, Tensor) for value in batch.values()):
        raise ConfigError(
            f"has {', '.join(map(repr, example)) or 'nothing'}, of which the forward of {type(model).__name__} takes "
            f"no tensor; expected some of {', '.join(signature.parameters)}",
            key="example",
        )
    return {name: map_tensors(_on_cpu(model.dtype), value) for name, value in batch.items()}


def _on_cpu(dtype: torch.dtype) -> Any:
    """Return a function that puts a tensor onto the CPU, in the type of the model if it is of numbers with a point."""
    return lambda tensor: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
