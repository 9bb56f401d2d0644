"""The layouts of messages on which the ranks have agreed, by the layout of a step's batch.

The first time that a batch layout runs, every message brings its own description. The layouts of inputs and outputs are
remembered under the batch's signature, which is equal on all ranks, and hold for each later batch of this layout.
"""

from typing import Any

from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.values.layouts import Layout, TensorInfo, is_alike
from penstock.execute.values.tree import flatten

Key = tuple[int, int, int]
"""Stage, microbatch, slice."""
MAX_LAYOUTS = 256
"""So many layouts of batches are remembered, those that ran last: of texts or shapes that change at every step, each
makes a new one."""


class AgreedLayouts:
    """The layouts of one rank's messages in the current step, and in the steps before it."""

    def __init__(self, rank: int, *, has_variable_shapes: bool) -> None:
        self._rank = rank
        self._has_variable_shapes = has_variable_shapes
        self._before: dict[str, tuple[dict[Key, Layout], dict[Key, Layout]]] = {}
        self._signature = ""
        self.is_static = False
        """Whether both ends of every message of this step know its layout."""
        self.received: dict[Key, Layout] = {}
        """Of the inputs of this rank's stages."""
        self.produced: dict[Key, Layout] = {}
        """Of their outputs."""

    def begin(self, signature: str) -> None:
        """Start a step with a batch of this layout; every rank passes the same signature."""
        self._signature = signature
        layouts = self._before.get(signature)
        self.is_static = layouts is not None and not self._has_variable_shapes
        self.received, self.produced = layouts if self.is_static and layouts else ({}, {})

    def finish(self) -> None:
        """From now on this batch layout is known."""
        self._before.pop(self._signature, None)  # the newest comes last
        self._before[self._signature] = (self.received, self.produced)
        if len(self._before) > MAX_LAYOUTS:
            # On all ranks alike, which run the same steps: one that forgot a layout which its peer still knows would
            # wait for a header that nobody sends.
            del self._before[next(iter(self._before))]

    def forget(self) -> None:
        """Forget all agreements: after a failure some ranks may have noted a layout that others never saw."""
        self._before.clear()
        self.begin("")

    def note_outputs(self, key: Key, outputs: Any, action: str) -> None:
        """Remember, or check, what a stage produced."""
        agreed = self.produced.get(key)
        if agreed is not None and agreed.fits_tensor(outputs):
            return
        leaves, spec = flatten(outputs)
        layout = Layout(spec, tuple(TensorInfo.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if agreed is None:
            agreed = self.produced[key] = layout
        if not is_alike(layout, agreed):
            raise PipelineError(
                f"{action}: the output is {layout}, but the ranks agreed on {agreed} for batches of "
                f"this layout. {_cure(layout, agreed)}; or create the pipeline with variable_shapes=True",
                rank=self._rank,
                instruction=action,
            )

    def output_bytes(self) -> dict[int, int]:
        """Return, per stage of this rank but a last one, the bytes of its largest output in this step."""
        largest: dict[int, int] = {}
        for (stage, _, _), agreed in self.produced.items():
            largest[stage] = max(largest.get(stage, 0), agreed.num_bytes)
        return largest


def _cure(layout: Layout, agreed: Layout) -> str:
    """Say what to change; where floating-point types alone differ, autocast was most likely switched."""
    if layout.spec.to_text() == agreed.spec.to_text() and _types_apart(layout) == _types_apart(agreed):
        return (
            "Run every step within torch.autocast of the same type, or none, and let layers return the same types for "
            "equal batches"
        )
    return (
        "Return the same shapes, types and texts for equal batches, whatever the numbers in them, and let the same "
        "tensors need a gradient"
    )


def _types_apart(layout: Layout) -> list[object]:
    """Return the leaves, those in a floating-point type without it."""
    return [
        (leaf.shape, leaf.requires_grad) if isinstance(leaf, TensorInfo) and leaf.dtype.is_floating_point else leaf
        for leaf in layout.leaves
    ]
