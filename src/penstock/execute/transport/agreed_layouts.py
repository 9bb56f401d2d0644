"""The layouts of messages on which the ranks have agreed, by the layout of a step's batch.

The first time that a batch layout runs, every message brings its own description. The layouts of inputs and outputs are
remembered under the batch's signature, which is equal on all ranks, and hold for each later batch of this layout.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.values.layouts import Layout, TensorInfo, is_alike
from penstock.execute.values.tree import flatten

PassKey = tuple[int, int, int]
"""Stage, microbatch and slice of a pass whose inputs or outputs travel."""
MAX_LAYOUTS = 256
"""Number of batch layouts that are remembered, those that ran last; a text or shape that changes at every step makes a
new one each time."""
_RAGGED = -1
"""Stands for a length of a jagged tensor."""


class AgreedLayouts:
    """The layouts of one rank's messages in the current step, and in the steps before it."""

    def __init__(self, rank: int, *, has_variable_shapes: bool) -> None:
        self._rank = rank
        self._has_variable_shapes = has_variable_shapes
        self._layouts_by_signature: dict[str, tuple[dict[PassKey, Layout], dict[PassKey, Layout]]] = {}
        self._signature = ""
        self.is_static = False
        """Whether both ends of every message of this step know its layout."""
        self.received: dict[PassKey, Layout] = {}
        """Layouts of the inputs of this rank's stages."""
        self.produced: dict[PassKey, Layout] = {}
        """Layouts of the outputs of this rank's stages."""

    def begin(self, signature: str) -> None:
        """Start a step with a batch of this layout; every rank passes the same signature."""
        self._signature = signature
        layouts = self._layouts_by_signature.get(signature)
        self.is_static = layouts is not None and not self._has_variable_shapes
        self.received, self.produced = layouts if self.is_static and layouts else ({}, {})

    def finish(self) -> None:
        """Remember the layouts of this step for later batches of its layout."""
        self._layouts_by_signature.pop(self._signature, None)  # the newest comes last
        self._layouts_by_signature[self._signature] = (self.received, self.produced)
        if len(self._layouts_by_signature) > MAX_LAYOUTS:
            # All ranks run the same steps and so forget the same layouts. A rank that forgot a layout which its peer
            # still knows would wait for a header that nobody sends.
            del self._layouts_by_signature[next(iter(self._layouts_by_signature))]

    def forget(self) -> None:
        """Forget all agreements: after a failure some ranks may have noted a layout that others never saw."""
        self._layouts_by_signature.clear()
        self.begin("")

    def note_outputs(self, key: PassKey, outputs: Any, action: str) -> None:
        """Remember the layout of a stage's outputs, or compare it with the layout on which the ranks agreed."""
        agreed_layout = self.produced.get(key)
        if agreed_layout is not None and agreed_layout.fits_tensor(outputs):
            return
        leaves, spec = flatten(outputs)
        layout = Layout(spec, tuple(_info_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if agreed_layout is None:
            agreed_layout = self.produced[key] = layout
        if not is_alike(layout, agreed_layout):
            raise PipelineError(
                f"{action}: the output is {layout}, but the ranks agreed on {agreed_layout} for batches of "
                f"this layout. {_cure(layout, agreed_layout)}; or create the pipeline with variable_shapes=True",
                rank=self._rank,
                instruction=action,
            )

    def output_bytes(self) -> dict[int, int]:
        """Return, per stage of this rank but a last one, the bytes of its largest output in this step."""
        max_bytes_by_stage: dict[int, int] = {}
        for (stage, _, _), layout in self.produced.items():
            max_bytes_by_stage[stage] = max(max_bytes_by_stage.get(stage, 0), layout.num_bytes)
        return max_bytes_by_stage


def _info_of(output: Tensor) -> TensorInfo:
    """Return what is agreed on about an output; of a jagged one, which never leaves its rank, no lengths.

    Its ragged length is a new symbol in every step, which equals no other and cannot be counted with.
    """
    if output.layout is torch.jagged:
        return TensorInfo((_RAGGED,) * output.dim(), output.dtype, output.requires_grad)
    return TensorInfo.of(output)


def _cure(layout: Layout, agreed_layout: Layout) -> str:
    """Say what to change; where floating-point types alone differ, autocast was most likely switched."""
    leaves, agreed_leaves = map(_leaves_without_float_types, (layout, agreed_layout))
    if layout.spec.to_text() == agreed_layout.spec.to_text() and leaves == agreed_leaves:
        return (
            "Run every step within torch.autocast of the same type, or none, and let layers return the same types for "
            "equal batches"
        )
    return (
        "Return the same shapes, types and texts for equal batches, whatever the numbers in them, and let the same "
        "tensors need a gradient"
    )


def _leaves_without_float_types(layout: Layout) -> list[object]:
    """Return the leaves of a layout; of one in a floating-point type, its shape and `requires_grad` alone."""
    return [
        (leaf.shape, leaf.requires_grad) if isinstance(leaf, TensorInfo) and leaf.dtype.is_floating_point else leaf
        for leaf in layout.leaves
    ]
