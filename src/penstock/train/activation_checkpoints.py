"""Activation checkpointing of a run's layers: what a layer of several modules keeps for its backward.

    none        what autograd saves
    full        its inputs; its forward runs again in its backward
    selective   also the results of matrix products and of attention, so that only what is cheap runs again

Layers of one module (an embedding, a norm, a head) keep little beside their inputs, and stay as they are. RECOMPUTE in
a schedule is the other way: it keeps the inputs of a whole stage, is planned, and shows in predicted times.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from penstock.errors import ConfigError
from penstock.execute.observing.layer_sizes import note_kept
from penstock.execute.undocumented import EXPENSIVE
from penstock.models import LayerSpec
from penstock.train.settings.section import Kept

KEY = "pipeline.activation_checkpointing"


def kinds_of_layers(setting: Kept | Sequence[Kept], layers_of_stage: Sequence[range]) -> list[Kept]:
    """Return the kind of checkpointing of each layer; `setting` is one kind for all stages, or a kind per stage.

    Raises:
        ConfigError: the list has another number of entries than there are stages.
    """
    if not isinstance(setting, str) and len(setting) != len(layers_of_stage):
        raise ConfigError(
            f"{len(setting)} entries for {len(layers_of_stage)} stages; give one per stage, or one word for all",
            key=KEY,
        )
    num_layers = max(layers.stop for layers in layers_of_stage)
    kinds: list[Kept] = ["none"] * num_layers
    for stage, layers in enumerate(layers_of_stage):
        for layer in layers:
            kinds[layer] = setting if isinstance(setting, str) else setting[stage]
    return kinds


def with_checkpointing(layers: Sequence[LayerSpec], kinds: Sequence[Kept]) -> list[LayerSpec]:
    """Return layers whose forwards save for the backward what their kind of checkpointing says."""
    return [
        layer if kind == "none" else replace(layer, build=partial(_checkpointed, layer.build, kind))
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def _checkpointed(build: Callable[[], nn.Module], kind: Kept) -> nn.Module:
    return checkpoint_layer(build(), kind)


def checkpoint_layer(layer: nn.Module, kind: Kept) -> nn.Module:
    """Have the forward of a layer save for the backward what a kind of checkpointing says, and return the layer."""
    if kind == "none":
        return layer
    # A part of a cut model runs the forward of that model around its modules, which would not run again alike.
    for module in getattr(layer, "working_modules", [layer]):
        if any(module.children()):
            _checkpoint(module, kind)
    return layer


def _policy(context: SelectiveCheckpointContext, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of operations that take long, and have the forward's memory counted with them."""
    if function not in EXPENSIVE:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if not (context.is_recompute or torch.compiler.is_compiling()):
        note_kept(getattr(context, "op_output", None))  # torch before 2.13 may not say it
    return CheckpointPolicy.MUST_SAVE


def _checkpoint(module: nn.Module, kind: Kept) -> None:
    forward = module.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # As an attribute of the module, so that its parameters keep their names.
        return checkpoint(forward, *args, **options, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    module.forward = checkpointed
