"""Recomputation of a stage: its forward keeps its inputs only, and runs again right before its backward.

    F   inputs ──> layers ──> outputs          the graph is made, for it tells which outputs need a gradient, but what
                                               its nodes would save is dropped at once
    R   the same inputs ──> layers ──> graph   saved as a forward's is; the outputs are dropped

So R is the forward of any stage, with its skips, losses and slices, and the backward never knows. What the first run
has noted, such as losses, is not noted again; buffers that layers change, such as the running means of a batch norm,
change once, since R runs on copies. Random numbers are drawn again by `randomness`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PipelineError
from penstock.execute.batch.step import Step
from penstock.execute.stages.carried import RunForward, Save
from penstock.execute.stages.stage import SavedForward, Stage


@dataclass(slots=True, eq=False)
class Checkpoint(SavedForward):
    """What a forward keeps that runs again: everything that it was called with."""

    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


def keep_arguments(stage: Stage, run: RunForward, save: Save) -> tuple[RunForward, Save]:
    """Return a forward whose activations are dropped, and what keeps its arguments in their place."""
    called: list[Checkpoint] = []

    def run_and_drop(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        with saved_tensors_hooks(_drop, _refuse):
            outputs = run(arguments, keywords)
        if stage.skips is not None:
            arguments, _ = stage.skips.spared(arguments, outputs)
        called.append(Checkpoint([], [], [], arguments=arguments, keywords=keywords))
        return outputs

    def keep(inputs: Any, outputs: Any) -> SavedForward:
        save(inputs, outputs)  # refuses what cannot be trained now, not when it runs again
        return called.pop()

    return run_and_drop, keep


@contextmanager
def on_copied_buffers(stage: Stage) -> Iterator[None]:
    """Let the layers read and change copies of their buffers; afterwards they have their own again, unchanged."""
    modules = dict.fromkeys(module for layer in stage.layers.values() for module in layer.modules())
    found = [(module, *named) for module in modules for named in module.named_buffers(recurse=False)]
    copies = {id(buffer): buffer.clone() for _, _, buffer in found}
    for module, name, buffer in found:
        setattr(module, name, copies[id(buffer)])
    try:
        yield
    finally:
        for module, name, buffer in found:
            setattr(module, name, buffer)


def unnoted(step: Step) -> Step:
    """Return a step in which nothing is noted that the step at hand has noted already."""
    return replace(step, losses={}, outputs={}, named={}, reported={}, keeps_outputs=False)


def checkpoint_of(saved: SavedForward | None, action: str) -> Checkpoint:
    """Return what the forward of an action has kept.

    Raises:
        PipelineError: it ran without keeping its arguments.
    """
    if not isinstance(saved, Checkpoint):
        raise PipelineError(f"{action}: its forward has kept no inputs; run the program that was checked")
    return saved


def _drop(saved: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise PipelineError(
        "a layer ran a backward through its own forward, whose activations are computed again later; take its stage "
        "out of the recomputation"
    )
