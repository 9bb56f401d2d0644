"""`layer_work`: the work of each layer of a model, for one microbatch, without its weights and without a device."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, get_args

import torch

from penstock.errors import ConfigError, described, nearest, shortened
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.model_loss import with_model_loss
from penstock.execute.stages.layers import layer_names
from penstock.simulation.costs.layer_work import LayerWork
from penstock.sizing.batch import TokenBatch
from penstock.sizing.model_source import layers_of
from penstock.sizing.walk import SizedLayer, Walk
from penstock.train.settings.section import Kept


def layer_work(
    model: Any,
    *,
    sequence_length: int,
    microbatch: int = 1,
    activation_checkpointing: Kept | Sequence[Kept] = "none",
    split: Sequence[int] | None = None,
    loss: Loss | None = None,
    data_type: torch.dtype | str | None = None,
) -> list[LayerWork]:
    """Return what each layer does and keeps for one microbatch: products, bytes moved and bytes held.

    `model` is what `Pipeline` takes as layers, of a model of tokens: `LayerSpec`s, callables or modules; or a folder of
    transformers, of which config.json suffices, a config or a model of it. Nothing of its size is allocated.
    `microbatch` is the number of its sequences, and `sequence_length` that of their tokens. `activation_checkpointing`
    is one kind, or one for each layer. `split` is the number of layers of each stage: what the layers of a stage share
    is counted in the first of them. Without it, each layer counts as a stage of its own, which is 0 to 3 % more in
    decoders. `loss` is by default the model's own, and is part of the last layer; `data_type` is the type of the
    parameters, by default as the layers have them.

    Raises:
        ConfigError: no layers, an unknown kind, type or split, a first layer that takes no tokens, a sequence beyond
            the model's positions, or a layer that decides by the values of its inputs.
        PartitionError: a layer cannot be built.
    """
    layers = layers_of(model)
    kinds = _kinds(activation_checkpointing, len(layers))
    names = layer_names(layers)
    sized_layers = [SizedLayer(*row) for row in zip(names, layers, kinds, strict=True)]
    model_loss, _ = with_model_loss(layers, loss, {})
    batch = TokenBatch.of(layers, microbatch, sequence_length)
    return Walk(sized_layers, batch, model_loss, _dtype(data_type)).works(_layers_of_stages(split, len(layers)))


def _kinds(setting: Kept | Sequence[Kept], num_layers: int) -> list[Kept]:
    known = get_args(Kept)
    if not isinstance(setting, Sequence):
        raise ConfigError(
            f"{described(setting)}; expected one of {', '.join(known)}, or one for each layer",
            key="activation_checkpointing",
        )
    kinds: list[Kept] = [setting] * num_layers if isinstance(setting, str) else list(setting)
    if len(kinds) != num_layers:
        raise ConfigError(
            f"{len(kinds)} entries for {num_layers} layers; give one per layer, or one word for all",
            key="activation_checkpointing",
        )
    for kind in kinds:
        if kind not in known:
            hint = nearest(str(kind), known)
            raise ConfigError(
                f"{shortened(kind)}; expected one of {', '.join(known)}.{hint}", key="activation_checkpointing"
            )
    return kinds


def _dtype(data_type: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating-point type from the type itself or its name. Raises: ConfigError."""
    if data_type is None:
        return None
    dtype = getattr(torch, data_type, None) if isinstance(data_type, str) else data_type
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"{described(data_type)}; expected a floating-point type of torch, such as 'bfloat16'", key="data_type"
        )
    return dtype


def _layers_of_stages(split: Sequence[int] | None, num_layers: int) -> list[range]:
    """Return the layers of each stage; by default each is a stage of its own. Raises: ConfigError."""
    sizes = [1] * num_layers if split is None else split
    is_list = isinstance(sizes, Sequence) and all(isinstance(size, int) and size > 0 for size in sizes)
    if not is_list or sum(sizes) != num_layers:
        raise ConfigError(
            f"{shortened(sizes)}; expected layers per stage, 1 or more each, that add up to {num_layers}", key="split"
        )
    return [range(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]
