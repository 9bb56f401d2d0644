"""The layouts of messages on which the ranks have agreed, by the layout of a step's batch.

The first time that a batch layout runs, every message brings its own description. The layouts of inputs and outputs are
remembered under the batch's signature, which is equal on all ranks, and hold for each later batch of this layout.

They are also remembered by the kind of microbatch: what its own parts are like, and the route that it travels. So a
batch of known microbatches, in another number, brings no descriptions. A model whose layers return other shapes for
microbatches of one kind ends this: the rank that sees it tells the others before the next step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.values.layouts import Layout, TensorInfo, is_alike
from penstock.execute.values.tree import flatten

PassKey = tuple[int, int, int]
"""Stage, microbatch and slice of a pass whose inputs or outputs travel."""
_StageKey = tuple[int, int]
"""Stage and slice of a pass."""
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
        self._layouts_by_kind: dict[str, tuple[dict[_StageKey, Layout], dict[_StageKey, Layout]]] = {}
        self.are_alike = True
        """Whether all microbatches of a kind have had equal layouts on this rank."""
        self._signature = ""
        self._kinds: Sequence[str] = ()
        self.is_static = False
        """Whether both ends of every message of this step know its layout."""
        self.received: dict[PassKey, Layout] = {}
        """Layouts of the inputs of this rank's stages."""
        self.produced: dict[PassKey, Layout] = {}
        """Layouts of the outputs of this rank's stages."""

    def knows(self, signature: str) -> bool:
        """Whether nothing is to be learnt from the kinds of a batch's microbatches."""
        return self._has_variable_shapes or signature in self._layouts_by_signature

    def begin(self, signature: str, kinds: Sequence[str] = ()) -> None:
        """Start a step with a batch of this layout; every rank passes the same signature, and the same `kinds`.

        `kinds` has a text for each microbatch; it is empty where the ranks cannot tell microbatches by their kind.
        """
        self._signature, self._kinds = signature, kinds
        layouts = self._layouts_by_signature.get(signature) or self._known_by_kind()
        self.is_static = layouts is not None and not self._has_variable_shapes
        self.received, self.produced = layouts if self.is_static and layouts else ({}, {})

    def finish(self) -> None:
        """Remember the layouts of this step for later batches of its layout."""
        self._layouts_by_signature.pop(self._signature, None)  # the newest comes last
        self._layouts_by_signature[self._signature] = (self.received, self.produced)
        self._remember_kinds()
        if len(self._layouts_by_signature) > MAX_LAYOUTS:
            # All ranks run the same steps and so forget the same layouts. A rank that forgot a layout which its peer
            # still knows would wait for a header that nobody sends.
            del self._layouts_by_signature[next(iter(self._layouts_by_signature))]

    def forget(self) -> None:
        """Forget all agreements: after a failure some ranks may have noted a layout that others never saw."""
        self._layouts_by_signature.clear()
        self._layouts_by_kind.clear()
        self.are_alike = True
        self.begin("")

    def _known_by_kind(self) -> tuple[dict[PassKey, Layout], dict[PassKey, Layout]] | None:
        """Return the layouts of inputs and outputs of a step whose microbatches are all of known kinds; else None."""
        if not self._kinds or any(kind not in self._layouts_by_kind for kind in self._kinds):
            return None
        received: dict[PassKey, Layout] = {}
        produced: dict[PassKey, Layout] = {}
        for microbatch, kind in enumerate(self._kinds):
            for of_step, of_kind in zip((received, produced), self._layouts_by_kind[kind], strict=True):
                of_step |= {(stage, microbatch, index): layout for (stage, index), layout in of_kind.items()}
        return received, produced

    def _remember_kinds(self) -> None:
        """Remember the layouts of this step by the kinds of its microbatches, the last ones that ran."""
        for kind in dict.fromkeys(self._kinds):
            self._layouts_by_kind[kind] = self._layouts_by_kind.pop(kind, ({}, {}))  # the newest comes last
        for side, of_step in enumerate((self.received, self.produced)) if self._kinds else ():
            for (stage, microbatch, index), layout in of_step.items():
                of_kind = self._layouts_by_kind[self._kinds[microbatch]][side]
                known = of_kind.setdefault((stage, index), layout)
                self.are_alike = self.are_alike and (known is layout or is_alike(layout, known))
        for kind in list(self._layouts_by_kind)[:-MAX_LAYOUTS]:
            del self._layouts_by_kind[kind]

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
