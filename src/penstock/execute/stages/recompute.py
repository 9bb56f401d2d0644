"""Recomputation of a stage: its forward keeps its inputs only, and runs again right before its backward.

    F   inputs ──> layers ──> outputs          the graph is made, for it tells which outputs need a gradient, but what
                                               its nodes would save is dropped at once
    R   the same inputs ──> layers ──> graph   saved as a forward's is; the outputs are dropped

So R is the forward of any stage, with its skips, losses and slices, and the backward never knows. R notes no loss or
output a second time. Buffers that layers or the loss change, such as the vectors of a spectral norm, change once: R
runs on copies, which have the values that F began with. Inputs that a layer changes in place are refused, and so is a
target that the loss function changes. Without a seed for the step (`randomness`), R sets the generators back to where F
began.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.stages.feature import ForwardPart
from penstock.execute.stages.passes import Inputs, Keywords, SavedForward, StagePasses
from penstock.execute.stages.stage import modules_of
from penstock.execute.step import Step
from penstock.execute.undocumented import version_of
from penstock.execute.values.tree import map_leaves
from penstock.execute.values.version_guard import VersionGuard

_LOSS_CHANGES = (
    "the loss function changed its target in place, or an input of the stage, so that its recomputation would begin "
    "with other values. Let it compute from a clone(), as in target - 1, or take the stage out of the recomputation"
)


@dataclass(slots=True, eq=False, weakref_slot=True)
class BufferCopy:
    """The values of a buffer when a forward began."""

    buffer: Tensor
    version: int
    values: Tensor


def _has_changed_unseen(copy: BufferCopy) -> bool:
    buffer = copy.buffer
    can_be_compared = type(buffer) is Tensor and buffer.layout is torch.strided
    return can_be_compared and copy.version == version_of(buffer) and not torch.equal(copy.values, buffer)


Where = tuple[nn.Module, str]
Copies = dict[Where, BufferCopy]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The arguments of a forward that runs again, and the buffers as it read them."""

    parts: Sequence[ForwardPart]
    """The parts of the stage's features, for the second run."""
    arguments: Inputs
    keywords: Keywords
    buffers: Copies
    called_with: VersionGuard


class BufferCopier:
    """Copies the buffers of modules for forwards; those between which a buffer stays as it is share one copy."""

    def __init__(self) -> None:
        self._latest: WeakValueDictionary[Where, BufferCopy] = WeakValueDictionary()
        self._unseen: set[Where] | None = None
        """Buffers that change without a new version, as by `.data`; None before the first forward."""

    def copies(self, modules: Sequence[nn.Module]) -> Copies:
        """Return the buffers with the values that they have now."""
        return {where: self._copy(where, buffer) for where, buffer in _buffers(modules).items()}

    def learn(self, copies: Copies) -> None:
        """Compare the values behind the first forward with those before it."""
        if self._unseen is None:
            self._unseen = {where for where, copy in copies.items() if _has_changed_unseen(copy)}

    def _copy(self, where: Where, buffer: Tensor) -> BufferCopy:
        latest = self._latest.get(where)
        is_seen = self._unseen is None or where not in self._unseen
        if latest is None or not is_seen or latest.buffer is not buffer or latest.version != version_of(buffer):
            latest = self._latest[where] = BufferCopy(buffer, version_of(buffer), buffer.clone())
        return latest


class Recomputation:
    """Runs those forwards of a stage that keep their inputs only, and runs them again before their backward."""

    def __init__(self, passes: StagePasses) -> None:
        self._passes = passes
        self._copier = BufferCopier()

    def forward(self, step: Step, place: MicrobatchKey, inputs: Inputs, keywords: Keywords) -> tuple[Any, Checkpoint]:
        """Run the layers; return what leaves the stage, and what `run_again` needs.

        Raises:
            PipelineError: the layers or the loss change what the second run would begin with.
        """
        passes = self._passes
        target = step.slices[place[0]][place[1]].target if passes.options.is_last else None
        buffers = self._copier.copies(self._modules(step))
        guard = VersionGuard.of((inputs, keywords, target))
        parts = passes.begin_parts(step, place)
        first_inputs = _as_other_leaves(inputs) if passes.options.is_first else inputs
        with saved_tensors_hooks(lambda tensor: None, _refuse):
            outputs, deferred = passes.run_layers(parts, first_inputs, _as_other_leaves(keywords))
        _refuse_changed(guard)
        passes.finish(step, place, parts, inputs, outputs, deferred)  # refuses what cannot be trained now, not in R
        if passes.options.is_last and guard.is_changed:
            raise PipelineError(_LOSS_CHANGES)
        self._copier.learn(buffers)
        # The values of skips that only pass are not kept: a later stage has them, and R needs their shapes alone.
        for part in parts:
            inputs, _ = part.without_passing(inputs, outputs)
        checkpoint_guard = VersionGuard.of((inputs, keywords, target))
        return outputs, Checkpoint([part.again() for part in parts], inputs, keywords, buffers, checkpoint_guard)

    def run_again(self, step: Step, place: MicrobatchKey, checkpoint: Checkpoint) -> SavedForward | None:
        """Run a forward again, on what it began with; return what its backward needs.

        Raises:
            PipelineError: its arguments were changed since.
        """
        _refuse_changed(checkpoint.called_with)
        passes, inputs, parts = self._passes, checkpoint.arguments, checkpoint.parts
        if not passes.options.is_first:
            inputs = _as_other_leaves(inputs)
        with on_copied_buffers(self._modules(step), checkpoint.buffers):
            outputs, deferred = passes.run_layers(parts, inputs, checkpoint.keywords)
            return passes.finish(step.again(), place, parts, inputs, outputs, deferred)

    def _modules(self, step: Step) -> list[nn.Module]:
        """Return the layers, and on a last stage the loss function, which runs again too."""
        loss = step.losses.loss if self._passes.options.is_last else None
        return [*self._passes.stage.modules, *([loss] if isinstance(loss, nn.Module) else [])]


@contextmanager
def on_copied_buffers(modules: Sequence[nn.Module], copies_of_forward: Copies) -> Iterator[None]:
    """Let modules read and change the buffers that their forward began with; afterwards they have their own again.

    Modules that share a buffer share its copy.
    """
    own_buffers = _buffers(modules)
    copy_by_id: dict[int, Tensor] = {}
    for where, buffer in own_buffers.items():
        copy = copies_of_forward.get(where)
        source, values = (buffer, buffer) if copy is None else (copy.buffer, copy.values)
        if id(source) not in copy_by_id:
            copy_by_id[id(source)] = values.clone()  # what was kept may serve other forwards too, and R changes it
        setattr(*where, copy_by_id[id(source)])
    try:
        yield
    finally:
        for where, buffer in own_buffers.items():
            setattr(*where, buffer)


def _as_other_leaves(arguments: Any) -> Any:
    """Return the arguments of a forward with other leaves over the same memory for those that need a gradient.

    A hook that a layer registers on one of its inputs stays on that tensor, and the backward of the second run would
    call those of the first run too. So the runs have different leaves. The batch and keywords, which are the caller's,
    belong to the second run, whose backward gives the caller its gradients.
    """
    leaves: dict[int, Tensor] = {}

    def other(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.requires_grad):
            return leaf
        if id(leaf) not in leaves:  # two arguments may be one tensor
            leaves[id(leaf)] = leaf.detach().requires_grad_()
        return leaves[id(leaf)]

    return map_leaves(other, arguments)


def _buffers(modules: Sequence[nn.Module]) -> dict[Where, Tensor]:
    all_modules = modules_of(modules)
    return {(module, name): buffer for module in all_modules for name, buffer in module.named_buffers(recurse=False)}


def _refuse_changed(called_with: VersionGuard) -> None:
    if called_with.is_changed:
        raise PipelineError(
            "an input of the stage, or the target, was changed in place, so that its recomputation would begin with "
            "other values. Let the layers and the loss work on a clone(), or take the stage out of the recomputation"
        )


def _refuse(_: None) -> Tensor:
    raise PipelineError(
        "a layer ran a backward through its own forward, whose activations are computed again later; take its stage "
        "out of the recomputation"
    )
