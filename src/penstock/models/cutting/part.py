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
from penstock.models.cutting.frame import ALIASED, SKIP, Course, Frame, Template, tensor_of
from penstock.models.cutting.missing import Missing
from penstock.models.cutting.placeholders import tensors_in

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PartCall:
    """The arguments with which a part calls the forward of the whole model."""

    inputs: tuple[Any, ...]
    """All that came to the part."""
    keywords: Mapping[str, Any]
    """Those of the batch."""
    is_first: bool
    is_training: bool = False
    is_dense: bool = False
    """Whether the forward may change in place what takes the place of tensors that are not there."""

    @property
    def kind(self) -> Any:
        """The keywords that the batch has, and the mode, on which the course of a forward commonly depends."""
        given = frozenset(name for name, value in self.keywords.items() if value is not None)
        return self.is_training, given

    def device(self, lent: Mapping[str, nn.Module]) -> torch.device:
        """Return that of the modules of the part, else that of its inputs."""
        for module in lent.values():
            for tensor in (*module.parameters(), *module.buffers()):
                return tensor.device
        tensors = tensors_in((self.inputs, dict(self.keywords)))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


class Entry(Protocol):
    """How the forward of the whole model is called, on any stage."""

    batch_signature: BatchSignature
    """The arguments of the forward that a batch may have."""

    def call(self, model: nn.Module, given: PartCall) -> Any:
        """Call the forward for a part; return the model's output."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Which part of the forward a layer runs, by the names of points."""

    start: str | None
    stop: str | None
    modules: tuple[str, ...]
    tensors: tuple[str, ...] = ()


@dataclass(slots=True)
class _Notes:
    """The arguments of a model's points for one microbatch; each is taken once.

    Where the batch has no keywords, it follows from the shapes, and serves all microbatches of these.
    """

    inputs: tuple[tuple[Any, ...], ...]
    """Shape, type and device of each tensor that came."""
    keywords: Mapping[str, Any]
    is_training: bool
    given: dict[str, Given]
    straight: set[str]
    """The points that are called in plain modes, and whose output goes to the next point as it is."""

    def take(self, point: str, inputs: tuple[tuple[Any, ...], ...], call: PartCall) -> Given | None:
        """Return what a point is given, unless it was taken already or is that of another microbatch or mode."""
        if call.is_training is not self.is_training or inputs != self.inputs:
            return None
        if call.keywords.keys() != self.keywords.keys():
            return None
        if any(value is not self.keywords[name] for name, value in call.keywords.items()):
            return None
        return self.given.pop(point, None) if self.keywords else self.given.get(point)


@dataclass(slots=True)
class _Here:
    """The frames and notes that one thread has of a cut model."""

    frames: dict[torch.device, Frame] = field(default_factory=dict)
    notes: _Notes | None = None
    checked: set[Any] = field(default_factory=set)
    """The kinds of batches of which what is noted was looked at, for values that are not there."""


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
        lent: Mapping[str, nn.Module],
        tensors: Mapping[str, Tensor],
        given: PartCall,
        *,
        checks: bool = False,
    ) -> tuple[Any, bool]:
        """Run a segment; return its output, and whether that is what its first module returned.

        With `checks`, an output that depends on what is not there is refused.
        """
        frame = self._frame(given.device(lent))
        course = Course(self.template.places, frame.device, segment.start, segment.stop, lent)
        course.arrived = given.inputs[0] if segment.start is not None else None
        course.missing = Missing() if checks and segment.start is not None else None
        output = self._on(frame, course, tensors, given)
        if course.missing is not None:
            _refuse_lost(segment, course.missing.origin_of(output))
        return output, segment.start in course.straight & course.plain

    def given(self, point: str, call: PartCall) -> Given | None:
        """Return what a point is given besides its first argument; None if its output does not go straight on."""
        here = self._here
        kinds = tuple((tuple(each.shape), each.dtype, each.device) for each in tensors_in(call.inputs))
        found = None if here.notes is None else here.notes.take(point, kinds, call)
        if found is not None:
            return found if here.notes is not None and point in here.notes.straight else None
        frame = self._frame(call.device({}))
        last = next(reversed(self.template.places))
        course = Course(self.template.places, frame.device, last, last, {}, notes={})
        course.missing = Missing() if call.kind not in here.checked else None
        self._on(frame, course, {}, call)
        straight = course.straight & course.plain
        here.notes = notes = _Notes(kinds, dict(call.keywords), call.is_training, course.notes or {}, straight)
        if course.missing is not None:
            _refuse_missing(notes.given, course.missing)
            here.checked.add(call.kind)
        found = notes.take(point, kinds, call)
        return found if point in notes.straight else None

    def _on(self, frame: Frame, course: Course, tensors: Mapping[str, Tensor], given: PartCall) -> Any:
        while True:
            course.restart(is_dense=self._is_dense)
            call = partial(self.entry.call, given=replace(given, is_dense=course.is_dense))
            try:
                return frame.run(call, course, tensors, is_training=given.is_training)
            except Exception as error:
                if ALIASED in str(error) and not self._is_dense:
                    self._is_dense = True  # the forward changes what a stand-in returned
                    continue
                if isinstance(error, PenstockError) or course.is_inside:
                    raise
                raise PenstockError(
                    f"the forward fails before it comes to {course.start!r}, where it runs without what layers before "
                    f"compute: {type(error).__name__}: {error}. All that it computes around its submodules must follow "
                    "from the batch; else put it into one of them"
                ) from error

    @property
    def _here(self) -> _Here:
        if not hasattr(self._of_threads, "here"):
            self._of_threads.here = _Here()
        here: _Here = self._of_threads.here
        return here

    def _frame(self, device: torch.device) -> Frame:
        frames = self._here.frames
        if device not in frames:
            frames[device] = Frame(self.template, device)
        return frames[device]


class CutPart(nn.Module):
    """A layer of a cut module; its parameters have the names that the whole module gives them."""

    has_full_names = True
    layer_weight = 1.0
    """Compute relative to the other parts, for the split into stages."""
    takes_slices = False
    """Masks and positions are made for whole sequences."""

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
            path, own = _branch(self, name)
            path.add_module(own, module)
        for name, tensor in tensors.items():
            path, own = _branch(self, name)
            if isinstance(tensor, nn.Parameter):
                path.register_parameter(own, tensor)
            else:
                path.register_buffer(own, tensor)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run this part of the model's forward."""
        segment, forward = self._segment, self._forward
        lent = {name: self.get_submodule(name) for name in segment.modules}
        call = PartCall(inputs, keywords, segment.start is None, self.training)
        needs_gradient = any(each.requires_grad for each in tensors_in(keywords))  # each part needs a graph of its own
        if self._passes_on and segment.start is not None and not needs_gradient:
            given = forward.given(segment.start, call)
            if given is not None:
                return lent[segment.start](inputs[0], *given[0], **given[1])
        tensors = {name: tensor_of(self, name) for name in segment.tensors}
        checks = call.kind not in self._checked
        output, passes_on = forward.run(segment, lent, tensors, call, checks=checks)
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
        """The class that messages name: that of the submodule which the layer is called after, if there is one."""
        named = self.layer_name in self._segment.modules
        return type(self.get_submodule(self.layer_name) if named else self).__name__

    def extra_repr(self) -> str:
        """Return the points between which it runs."""
        return f"{self._segment.start or 'the begin'} .. {self._segment.stop or 'the end'}"


def part_class(signature: BatchSignature) -> type[CutPart]:
    """Return a class of parts whose forward names the keywords of a batch, by which a pipeline passes them."""

    def forward(self: CutPart, *inputs: Any, **given: Any) -> Any:
        return CutPart.forward(self, *inputs, **given)

    named = [item.replace(kind=item.KEYWORD_ONLY) for item in signature.keywords]
    inputs = "inputs"
    while inputs in signature.parameters:  # also models name an argument so
        inputs = f"_{inputs}"
    own = [inspect.Parameter(name, kind) for name, kind in (("self", _POSITIONAL), (inputs, _VARIABLE))]
    others = [] if signature.var_keyword is None else [signature.var_keyword]
    forward.__signature__ = inspect.Signature([*own, *named, *others])  # type: ignore[attr-defined]
    return type("CutPart", (CutPart,), {"forward": forward})


_POSITIONAL, _VARIABLE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL


def _branch(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds what is called `name`, and its name there; missing ones are made."""
    *path, own = name.split(".")
    for step in path:
        if not isinstance(getattr(root, step, None), nn.Module):
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root, own


def _refuse_missing(given: Mapping[str, Given], missing: Missing) -> None:
    for point, (rest, kwargs) in given.items():
        for where, value in (*enumerate(rest, start=1), *kwargs.items()):
            origin = missing.origin_of(value)
            if origin is not None:
                raise PenstockError(
                    f"{point!r} gets an argument {where!r} that depends on what a layer of another stage computes, or "
                    f"holds: {origin!r}; a part gets its first argument from the part before it, and all else from the "
                    f"batch: {SKIP}"
                )


def _refuse_lost(segment: Segment, origin: str | None) -> None:
    if origin is not None:
        raise PenstockError(
            f"what the forward computes from {segment.start!r} to {segment.stop or 'the end'!r} depends "
            f"on what a layer of another stage computes besides its first argument, or holds: {origin!r}; {SKIP}, or "
            "leave out the point between the two. (Parameters and saved buffers beside the points are held "
            "by the first layer alone; a constant may be a buffer with persistent=False.)"
        )
