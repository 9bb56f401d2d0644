"""`CutPart`: one layer of a cut module. It holds submodules, and runs the forward from there to the next point.

Where a part passes what its one submodule returns straight on, as the blocks of a transformer do, later forwards call
that submodule alone. Its other arguments (masks, positions) are then noted for all points in one run of the frame,
by the first part of a stage that asks; that run also says whether the part passes on in this microbatch, which
may depend on the batch and on the mode.
"""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.batch_signature import BatchSignature
from penstock.models.cutting.course import Course
from penstock.models.cutting.frame import ALIASED, Frame, Template
from penstock.models.cutting.missing import Missing
from penstock.models.cutting.placeholders import tensors_in
from penstock.models.cutting.points import SKIP, tensor_of

PointArguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PartCall:
    """The arguments with which a part calls the forward of the whole model."""

    inputs: tuple[Any, ...]
    """The positional arguments of the part."""
    keywords: Mapping[str, Any]
    """The keywords of the batch."""
    is_first: bool
    is_training: bool = False
    is_dense: bool = False
    """Whether tensors without values have memory for each element, so that the forward may change them in place."""

    @property
    def kind(self) -> Any:
        """The keywords that the batch has, and the mode, on which the course of a forward commonly depends."""
        keyword_names = frozenset(name for name, value in self.keywords.items() if value is not None)
        return self.is_training, keyword_names

    def device(self, part_modules: Mapping[str, nn.Module]) -> torch.device:
        """Return the device of the part's modules, else that of its inputs."""
        for module in part_modules.values():
            for tensor in (*module.parameters(), *module.buffers()):
                return tensor.device
        tensors = tensors_in((self.inputs, dict(self.keywords)))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


class Entry(Protocol):
    """How the forward of the whole model is called, on any stage."""

    batch_signature: BatchSignature
    """The arguments of the forward that a batch may have."""

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        """Call the forward for a part; return the model's output."""
        ...


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


@dataclass(slots=True)
class _PointNotes:
    """The arguments of a model's points for one microbatch; each is taken once.

    Where the batch has no keywords, it follows from the shapes, and serves all microbatches of these.
    """

    input_kinds: tuple[tuple[Any, ...], ...]
    """Shape, dtype and device of each tensor among the inputs."""
    keywords: Mapping[str, Any]
    is_training: bool
    arguments_by_point: dict[str, PointArguments]
    passing_points: set[str]
    """The points that are called in the forward's own modes, as of autocast, and whose output goes on as it is."""

    def take(self, point: str, input_kinds: tuple[tuple[Any, ...], ...], call: PartCall) -> PointArguments | None:
        """Return the arguments of a point; None if they were taken already, or are of another microbatch or mode."""
        if call.is_training is not self.is_training or input_kinds != self.input_kinds:
            return None
        if call.keywords.keys() != self.keywords.keys():
            return None
        if any(value is not self.keywords[name] for name, value in call.keywords.items()):
            return None
        return self.arguments_by_point.pop(point, None) if self.keywords else self.arguments_by_point.get(point)


@dataclass(slots=True)
class _ThreadState:
    """The frames and notes that one thread has of a cut model."""

    frames: dict[torch.device, Frame] = field(default_factory=dict)
    notes: _PointNotes | None = None
    checked_kinds: set[Any] = field(default_factory=set)
    """The kinds of batches whose noted arguments were checked: none depends on values of another stage."""


class CutForward:
    """The forward of a cut model, which its parts share; threads may run parts of it side by side."""

    def __init__(self, template: Template, entry: Entry) -> None:
        self.template = template
        self.entry = entry
        self._of_threads = threading.local()
        self._is_dense = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "CutForward":
        """It holds no values, so that copies of its parts, which other ranks of one process run, share it."""
        return self

    def run(
        self,
        segment: Segment,
        part_modules: Mapping[str, nn.Module],
        tensors: Mapping[str, Tensor],
        part_call: PartCall,
        *,
        checks: bool = False,
    ) -> tuple[Any, bool]:
        """Run a segment; return its output, and whether that is what its first module returned.

        With `checks`, an output that depends on values of another stage is refused.
        """
        frame = self._frame(part_call.device(part_modules))
        course = Course(self.template.positions, frame.device, segment.start, segment.stop, part_modules)
        course.part_input = part_call.inputs[0] if segment.start is not None else None
        course.missing = Missing() if checks and segment.start is not None else None
        output = self._run_frame(frame, course, tensors, part_call)
        if course.missing is not None:
            _refuse_lost(segment, course.missing.origin_of(output))
        return output, segment.start in course.passing_points & course.same_mode_points

    def arguments_of(self, point: str, call: PartCall) -> PointArguments | None:
        """Return the arguments of a point besides its first one; None if its output does not go straight on."""
        state = self._thread_state
        kinds = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors_in(call.inputs))
        arguments = None if state.notes is None else state.notes.take(point, kinds, call)
        if arguments is not None:
            return arguments if state.notes is not None and point in state.notes.passing_points else None
        # The arguments of this microbatch are not noted yet. One run of the forward in which every module is a
        # stand-in notes those of all points, so that the other parts of the stage need no run.
        frame = self._frame(call.device({}))
        last = next(reversed(self.template.positions))
        course = Course(self.template.positions, frame.device, last, last, {}, point_arguments={})
        course.missing = Missing() if call.kind not in state.checked_kinds else None
        self._run_frame(frame, course, {}, call)
        passing_points = course.passing_points & course.same_mode_points
        state.notes = notes = _PointNotes(
            kinds, dict(call.keywords), call.is_training, course.point_arguments or {}, passing_points
        )
        if course.missing is not None:
            _refuse_missing(notes.arguments_by_point, course.missing)
            state.checked_kinds.add(call.kind)
        arguments = notes.take(point, kinds, call)
        return arguments if point in notes.passing_points else None

    def _run_frame(self, frame: Frame, course: Course, tensors: Mapping[str, Tensor], part_call: PartCall) -> Any:
        """Run the forward of a frame, once more if it turns out to change stand-ins' results in place."""
        while True:
            course.restart(is_dense=self._is_dense)
            call = partial(self.entry.call, part_call=replace(part_call, is_dense=course.is_dense))
            try:
                return frame.run(call, course, tensors, is_training=part_call.is_training)
            except Exception as error:
                if ALIASED in str(error) and not self._is_dense:
                    self._is_dense = True  # the forward changes what a stand-in returned, so that needs memory
                    continue
                if isinstance(error, PenstockError) or course.is_inside:
                    raise
                raise PenstockError(
                    f"the forward fails before it comes to {course.start!r}, where it runs without what layers before "
                    f"compute: {type(error).__name__}: {error}. All that it computes around its submodules must follow "
                    "from the batch; else put it into one of them"
                ) from error

    @property
    def _thread_state(self) -> _ThreadState:
        if not hasattr(self._of_threads, "state"):
            self._of_threads.state = _ThreadState()
        state: _ThreadState = self._of_threads.state
        return state

    def _frame(self, device: torch.device) -> Frame:
        frames = self._thread_state.frames
        if device not in frames:
            frames[device] = Frame(self.template, device)
        return frames[device]


class CutPart(nn.Module):
    """A layer of a cut module; its parameters have the names that the whole module gives them."""

    has_full_names = True
    layer_weight = 1.0
    """Compute relative to the other parts, for the split into stages."""
    takes_slices = False
    """Masks and positions are made for whole sequences, so a part takes no slices of them."""

    def __init__(
        self,
        forward: CutForward,
        name: str,
        segment: Segment,
        modules: Mapping[str, nn.Module],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """`modules` and `tensors` are those that the segment names; `name` is that of the layer."""
        super().__init__()
        self.layer_name = name
        self._forward, self._segment = forward, segment
        self._passes_on: bool | None = None
        self._checked: set[Any] = set()
        for name, module in modules.items():
            holder, local_name = _branch(self, name)
            holder.add_module(local_name, module)
        for name, tensor in tensors.items():
            holder, local_name = _branch(self, name)
            if isinstance(tensor, nn.Parameter):
                holder.register_parameter(local_name, tensor)
            else:
                holder.register_buffer(local_name, tensor)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run this part of the model's forward."""
        segment, forward = self._segment, self._forward
        part_modules = {name: self.get_submodule(name) for name in segment.modules}
        call = PartCall(inputs, keywords, segment.start is None, self.training)
        # Each part needs a graph of its own.
        needs_gradient = any(tensor.requires_grad for tensor in tensors_in(keywords))
        if self._passes_on and segment.start is not None and not needs_gradient:
            arguments = forward.arguments_of(segment.start, call)
            if arguments is not None:
                return part_modules[segment.start](inputs[0], *arguments[0], **arguments[1])
        tensors = {name: tensor_of(self, name) for name in segment.tensors}
        checks = call.kind not in self._checked
        output, passes_on = forward.run(segment, part_modules, tensors, call, checks=checks)
        self._checked.add(call.kind)
        if self._passes_on is None:
            self._passes_on = passes_on and segment.stop is not None
        return output

    @property
    def batch_signature(self) -> BatchSignature:
        """How the whole model takes a batch, which a pipeline binds by it."""
        return self._forward.entry.batch_signature

    @property
    def working_modules(self) -> list[nn.Module]:
        """The submodules of the layer, which compilers and checkpoints take in its place.

        Around them runs the forward of the model, which ends by an exception.
        """
        return [self.get_submodule(name) for name in self._segment.modules]

    @property
    def shown_class(self) -> str:
        """The name of a class for messages: that of the submodule which the layer is called after, if there is one."""
        is_submodule = self.layer_name in self._segment.modules
        return type(self.get_submodule(self.layer_name) if is_submodule else self).__name__

    def extra_repr(self) -> str:
        """Return the points between which it runs."""
        return f"{self._segment.start or 'the begin'} .. {self._segment.stop or 'the end'}"


def part_class(signature: BatchSignature) -> type[CutPart]:
    """Return a class of parts whose forward names the keywords of a batch, by which a pipeline passes them."""

    def forward(self: CutPart, *inputs: Any, **keywords: Any) -> Any:
        return CutPart.forward(self, *inputs, **keywords)

    keyword_parameters = [item.replace(kind=item.KEYWORD_ONLY) for item in signature.keywords]
    inputs_name = "inputs"
    while inputs_name in signature.parameters:  # also models name an argument so
        inputs_name = f"_{inputs_name}"
    positional_parameters = [
        inspect.Parameter(name, kind) for name, kind in (("self", _POSITIONAL), (inputs_name, _VARIABLE))
    ]
    variable_parameters = [] if signature.var_keyword is None else [signature.var_keyword]
    forward.__signature__ = inspect.Signature([*positional_parameters, *keyword_parameters, *variable_parameters])  # type: ignore[attr-defined]
    return type("CutPart", (CutPart,), {"forward": forward})


_POSITIONAL, _VARIABLE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL


def _branch(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module in which the full `name` lies, and the name there; missing modules on the way are made."""
    *path, local_name = name.split(".")
    for step in path:
        if not isinstance(getattr(root, step, None), nn.Module):
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root, local_name


def _refuse_missing(arguments_by_point: Mapping[str, PointArguments], missing: Missing) -> None:
    for point, (rest, kwargs) in arguments_by_point.items():
        for argument, value in (*enumerate(rest, start=1), *kwargs.items()):
            origin = missing.origin_of(value)
            if origin is not None:
                raise PenstockError(
                    f"{point!r} gets an argument {argument!r} that depends on what a layer of another stage computes, "
                    f"or holds: {origin!r}; a part gets its first argument from the part before it, and all else "
                    f"from the batch: {SKIP}"
                )


def _refuse_lost(segment: Segment, origin: str | None) -> None:
    if origin is not None:
        raise PenstockError(
            f"what the forward computes from {segment.start!r} to {segment.stop or 'the end'!r} depends "
            f"on what a layer of another stage computes besides its first argument, or holds: {origin!r}; {SKIP}, or "
            "leave out the point between the two. (Parameters and saved buffers beside the points are held "
            "by the first layer alone; a constant may be a buffer with persistent=False.)"
        )
