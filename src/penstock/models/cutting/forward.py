"""`CutForward`: the forward of a cut model, which its parts share.

For each microbatch, the first part of a stage that asks runs the forward without values (`Trial`); what it finds serves
all parts of the stage. A part whose output goes on as it is, as of the blocks of a transformer, then calls its
submodule alone; other parts run the forward from their point to the next one (`Course`).
"""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.course import Course, Stopped, require_kinds
from penstock.models.cutting.entry import Entry, PartCall
from penstock.models.cutting.frame import Frame, Template
from penstock.models.cutting.local_calls import call_module
from penstock.models.cutting.part_leaves import PartLeaves
from penstock.models.cutting.routes import Routes
from penstock.models.cutting.stand_in import CALL
from penstock.models.cutting.trees import tensors_in
from penstock.models.cutting.trials import Trials, restored_generators


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of the forward that a layer runs."""

    start: str | None
    """The point at which it begins; None: at the begin of the forward."""
    stop: str | None
    """The point before which it ends; None: at the end of the forward."""
    modules: tuple[str, ...]
    """Names of the submodules that it runs."""
    tensors: tuple[str, ...] = ()
    """Names of the parameters and saved buffers beside the points that it holds."""


@dataclass(frozen=True, slots=True)
class PartOutput:
    """What a part hands on where later parts need more than its next point's first argument."""

    value: Any
    """The first argument of the next point."""
    leaves: dict[str, Tensor]
    """What earlier submodules made, by label."""


class CutForward:
    """The forward of a cut model; threads may run parts of it side by side."""

    def __init__(self, template: Template, entry: Entry) -> None:
        self.template = template
        self.entry = entry
        self._of_threads = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CutForward":
        """It holds no values, so that copies of its parts, which other ranks of one process run, share it."""
        return self

    def run(
        self,
        segment: Segment,
        part_modules: Mapping[str, nn.Module],
        tensors: dict[str, Tensor],
        part_call: PartCall,
        leaves: Mapping[str, Tensor],
    ) -> Any:
        """Run a segment; `leaves` came with its input. Return its output. Raises: PenstockError."""
        device = part_call.device(part_modules)
        trials = self.trials
        routes = trials.routes(part_call, device, segment.start)
        arrived = self._arrived(segment, part_call, routes, leaves)
        if segment.start in routes.short and segment.stop is not None and len(segment.modules) == 1:
            return self._run_alone(part_modules, segment.start, part_call.inputs[0], arrived, routes)
        frame = trials.frame(device)
        wanted = () if segment.stop is None else routes.carried_before(self.template.positions[segment.stop])
        part_leaves = PartLeaves(arrived, wanted, routes.changed)
        part_leaves.keep_held(tensors, part_modules)
        generators = ExitStack()
        changes = _BufferChanges(frame, tensors)
        course = Course(
            self.template.positions,
            device,
            segment.start,
            segment.stop,
            part_modules,
            routes,
            part_call.inputs[0] if segment.start is not None else None,
            part_leaves,
            at_start=generators.close,
        )
        saved = {
            name: leaf for name, leaf in part_leaves.arrived.items() if name in self.template.saved_names
        } | tensors
        # Random draws before the part begins, as of a dropout on another stage, are undone.
        with generators, frame.running(course, course.labels, saved, is_training=part_call.is_training) as model:
            if segment.start is not None:
                generators.enter_context(restored_generators(device))
            try:
                output = self.entry.call(model, replace(part_call, run=course))
                if segment.stop is not None:
                    raise PenstockError(f"the forward has ended before {segment.stop!r}, unlike a run without values")
            except Stopped as stopped:  # the forward came to the point at which the part ends
                output = stopped.output
            except BaseException:
                trials.give_up(device)
                raise
            changes.keep()
        output = course.labels.replaced(output)
        course.require_values(output, "the output of the forward")
        trials.end_run(frame)
        return _part_output(output, part_leaves.outgoing())

    def _run_alone(
        self, part_modules: Mapping[str, nn.Module], start: str, value: Any, leaves: dict[str, Tensor], routes: Routes
    ) -> Any:
        """Run the submodule `start` of a part whose output goes on as it is."""
        position = self.template.positions[start]
        point, following = routes.points[position], routes.points[position + 1]
        args, kwargs = point.arguments.fill(leaves)
        args, kwargs = point.with_first(value, args, kwargs)
        output = call_module(part_modules[point.name], point.name, CALL, args, kwargs, routes)
        require_kinds(f"{point.name}#0", output, routes)
        made = {label: item for label, item in zip(point.output_labels, tensors_in(output), strict=True) if label}
        leaves = leaves | made
        return _part_output(following.input.fill(leaves), {label: leaves[label] for label in following.carried})

    def _arrived(
        self, segment: Segment, part_call: PartCall, routes: Routes, leaves: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the leaves of earlier parts that are here, the part's input among them if it is one."""
        if segment.start is None:
            return {}
        point = routes.points[self.template.positions[segment.start]]
        if set(leaves) != set(point.carried):
            raise PenstockError(
                f"{point.name!r} gets {sorted(leaves)} of earlier layers; expected {sorted(point.carried)}: the stages "
                "went other ways through the forward. Pass the same batch on all ranks"
            )
        inputs = zip(point.input_labels, tensors_in(part_call.inputs[0]), strict=True)
        return {**leaves, **{label: item for label, item in inputs if label and label not in routes.changed}}

    @property
    def trials(self) -> Trials:
        """The frames and routes of this thread."""
        if not hasattr(self._of_threads, "trials"):
            self._of_threads.trials = Trials(self.template, self.entry)
        trials: Trials = self._of_threads.trials
        return trials


class _BufferChanges:
    """Gives the saved buffers of a part the values of what the forward puts in their places."""

    def __init__(self, frame: Frame, tensors: Mapping[str, Tensor]) -> None:
        self._frame = frame
        self._buffers = {name: item for name, item in tensors.items() if not isinstance(item, nn.Parameter)}

    @torch.no_grad()
    def keep(self) -> None:
        if self._buffers:
            for name, tensor in self._frame.saved_tensors().items():
                if name in self._buffers and tensor is not self._buffers[name]:
                    self._buffers[name].copy_(tensor)


def _part_output(value: Any, leaves: dict[str, Tensor]) -> Any:
    return PartOutput(value, leaves) if leaves else value
