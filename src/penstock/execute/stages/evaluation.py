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
    """Put the layers of some stages into evaluation mode, and every module of theirs back into its own afterwards.

    `train()` sets every mode: in it a layer may do more than set its flag, such as merge adapters into its weights.
    """
    places = {layer: layer_place(name, layer) for stage in stages for name, layer in stage.layers.items()}
    # A module comes before its submodules, whose modes its train() sets too: a user may have frozen some of them, such
    # as a BatchNorm. A module that several share comes after each of them.
    modes = [
        (module, module.training, place)
        for layer, place in places.items()
        for _, module in layer.named_modules(remove_duplicate=False)
    ]
    try:
        for layer, place in places.items():
            _set_mode(layer, False, place)
        try:
            yield
        finally:
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
