"""Leaves the last layer of a model to the loss, where the loss applies it to some positions at a time (`tails`)."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import ConfigError
from penstock.execute.losses.tails import tail_of
from penstock.execute.stages.keywords import layer_place
from penstock.execute.stages.stage import Stage
from penstock.execute.stages.wrappers import is_sharded
from penstock.placement import Placement


def defer_tails(stages: Sequence[Stage], placement: Placement) -> None:
    """Let the last stages among some stages leave their last layer to the loss.

    Raises:
        ConfigError: the last layer does not say that it treats each position alone, or meets other ranks in it.
    """
    for stage in stages:
        if placement.next_stage[stage.index] >= 0:
            continue
        name, layer = stage.names[-1], stage.modules[-1]
        _refuse_wrapped(name, layer)
        tail = tail_of(layer)
        if tail is None:
            raise ConfigError(_no_tail(name, layer), key="loss")
        stage.defer_tail(tail)


def _refuse_wrapped(name: str, layer: nn.Module) -> None:
    """Refuse a last layer that gathers or reduces over other ranks itself, whose chunks may be fewer or more.

    Raises: ConfigError.
    """
    for module in layer.modules():
        if is_sharded(module) or isinstance(module, DistributedDataParallel):
            wrapper = "fully_shard" if is_sharded(module) else "DistributedDataParallel"
            raise ConfigError(
                f"the loss applies the last layer in chunks of positions, but {layer_place(name, layer)} is in "
                f"{wrapper}, which works with other ranks once per forward; give Pipeline a mesh, with shard='full' "
                f"where weights are to be shared out, instead of {wrapper}, or take a loss of its outputs",
                key="loss",
            )


def _no_tail(name: str, layer: nn.Module) -> str:
    return (
        f"the loss applies the last layer in chunks of positions, but {layer_place(name, layer)} does not say that it "
        "treats each position alone; let the last layer be an nn.Linear, or have a method tail(hidden), which returns "
        "what its forward does for hidden states [1, positions, width], or take a loss of its outputs"
    )
