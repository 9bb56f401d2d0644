"""`evaluating`: layers in evaluation mode for a while, each module then in its own mode again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from penstock.execute.control.error_notes import note_place
from penstock.execute.stages.keywords import layer_place
from penstock.execute.stages.stage import Stage
from penstock.execute.stages.wrappers import reshard


@contextmanager
def evaluating(stages: Sequence[Stage]) -> Iterator[None]:
    """Put the layers of some stages into evaluation mode, and afterwards each of their modules into its earlier mode.

    Every mode is set by `module.train(mode)`, since a layer may override it to do more than set the flag `training`,
    such as merge adapters into its weights. An error in `train` notes the layer and the call.
    """
    # The text that names each layer in an error.
    places = {layer: layer_place(name, layer) for stage in stages for name, layer in stage.layers.items()}
    # `train` of a module sets the modes of its submodules too. A user may have put some submodules into another mode
    # than the module, such as a frozen BatchNorm. So modes are restored from the outside in: this list has a module
    # before its submodules, and a submodule of several modules, which it lists several times, after each of them.
    modes = [
        (module, module.training, place)
        for layer, place in places.items()
        for _, module in layer.named_modules(remove_duplicate=False)
    ]
    try:
        for layer, place in places.items():
            if any(module.training for module in layer.modules()):
                _set_mode(layer, False, place)
        try:
            yield
        finally:
            # Layers under fully_shard stay gathered after a forward without a backward. A later forward would use
            # these weights, though an optimizer may have changed the shards since then.
            reshard(stages)
    finally:
        for module, mode, place in modes:
            if module.training is not mode:
                _set_mode(module, mode, place)


def _set_mode(module: nn.Module, is_training: bool, place: str) -> None:
    try:
        module.train(is_training)
    except Exception as error:
        note_place(error, f"train({is_training}) of {place}")
        raise
