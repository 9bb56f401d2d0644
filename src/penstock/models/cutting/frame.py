"""A module without its parts: its forward runs between two of them, with stand-ins for all that others have.

    Model.forward    embedding      blocks.0       blocks.1       norm       head
    part `blocks.1`  stand-in ...   stand-in ...   the block  ──► stop: what norm would get is the part's output

The forward is the module's own, so masks, positions and whatever else a part is given are made as the module makes
them. A stand-in returns tensors without values (placeholders.py), which need no gradient.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.missing import Missing
from penstock.models.cutting.placeholders import Placeholder, is_bare, on_meta, tensors_in, versions_of, without_values
from penstock.models.cutting.points import CutModel, first_argument, refuse_gradients, set_tensor, tensor_of

ALIASED = "single memory location"
"""torch's words for a change in place of a tensor that is one number, expanded."""
POINT_ORDER = "give the points of the cut in the order of the forward, in which each is called once"
Call = Callable[[nn.Module], Any]
"""Runs the forward of the module that it gets."""
VersionedBuffers = dict[str, tuple[Tensor, tuple[int, ...]]]
"""Buffers by name, with how often they were changed in place."""


class _Stopped(BaseException):
    """The forward has come to where the part ends; no `except Exception` of the module takes it."""

    def __init__(self, output: Any) -> None:
        self.output = output


@dataclass(slots=True)
class Course:
    """One run of the forward from one point to another, and its progress: stand-ins ask it for what they return."""

    points: Mapping[str, int]
    """The positions of the points in the forward, by name."""
    device: torch.device
    start: str | None
    """The point at which the part begins; None: at the begin of the forward."""
    stop: str | None
    """The point at which the part ends; None: at the end of the forward."""
    part_modules: Mapping[str, nn.Module]
    """The modules of the part, which run in place of their stand-ins."""
    part_input: Any = None
    """The input of the part, which takes the place of what its first module would get."""
    is_dense: bool = False
    """Whether tensors without values have memory for each element, so that the forward may change them in place."""
    missing: Missing | None = None
    """Finds what is computed from values that are not there, if that is wanted."""
    at_start: Callable[[], None] = field(default=lambda: None)
    """Called where the part begins."""
    at_first_point: Callable[[], None] = field(default=lambda: None)
    """Called where the forward meets its first point."""
    point_arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """The arguments of each point besides the first one, if that is wanted."""
    called_names: list[str] | None = None
    """The modules that the forward has called, if that is wanted."""
    passing_points: set[str] = field(default_factory=set)
    """The points whose output came to the next point as it was."""
    same_mode_points: set[str] = field(default_factory=set)
    """The points that the forward calls in the modes in which it was called itself, as of gradients and autocast."""
    modes: tuple[Any, ...] = ()
    """The modes in which the forward was called, as `modes_of` returns them."""
    position: int = -1
    """The position of the last point that the forward has called; -1 before the first."""
    last_point: tuple[str, Any, tuple[int, ...]] = ("", None, ())
    """The last point that was called, what it returned, and how often that had been changed in place."""

    def restart(self, *, is_dense: bool) -> None:
        """Reset the progress, for another run of the forward."""
        self.is_dense = is_dense
        self.position, self.last_point = -1, ("", None, ())
        self.passing_points.clear()
        self.same_mode_points.clear()

    @property
    def is_inside(self) -> bool:
        """Whether the part has begun."""
        return self.start is None or self.position >= self.points[self.start]

    def call_module(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder) -> Any:
        """Return what the forward of the model gets from its call of the submodule `name`.

        Submodules of this part are run. Others return tensors without values, of the shapes that `placeholder` finds.

        Raises:
            PenstockError: the forward calls something out of order, or a submodule that should be a point of the cut.
        """
        if self.called_names is not None:
            self.called_names.append(name)
        if name in self.points:
            return self._call_point(name, args, kwargs, placeholder)
        if name in self.part_modules:
            return self._run_part_module(name, args, kwargs)
        # Behind the start of the part, a value that is missing would become part of the result.
        if self.is_inside and self.start is not None:
            raise PenstockError(
                f"the forward calls {name!r} behind {self.start!r}, though it is defined before; name it as a point of "
                "the cut, in the order of the forward"
            )
        return self.without_value(placeholder.of(args, kwargs), name, (args, kwargs))

    def without_value(self, value: Any, origin: str, inputs: Any = ()) -> Any:
        """Return a tree like `value`, a result or attribute of the submodule `origin`, without its values.

        Tensors that are among the `inputs` of the submodule stay as they are.
        """
        input_tensors = tuple(tensors_in(inputs))
        output = without_values(value, self.device, is_dense=self.is_dense, constants=input_tensors)
        if self.missing is not None:
            input_ids = set(map(id, input_tensors))
            self.missing.mark(tuple(tensor for tensor in tensors_in(output) if id(tensor) not in input_ids), origin)
        return output

    def _run_part_module(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the part; missing values are not followed inside it, but from its inputs to its output."""
        missing = self.missing
        if missing is None:
            return self.part_modules[name](*args, **kwargs)
        origin = missing.origin_of((args, kwargs))
        with missing.paused():
            output = self.part_modules[name](*args, **kwargs)
        if origin is not None:
            missing.mark(output, origin)
        return output

    def _call_point(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder) -> Any:
        """Return what the forward of the model gets from its call of the point `name`, or stop the forward there.

        A point is a submodule at which the model is cut; a part is what one layer of the pipeline runs, from its point
        `start` up to the call of the point `stop`. The first argument of a point is the value that goes from part to
        part. A point of this part is run; any other returns a tensor without values, made by means of `placeholder`.

        Raises:
            PenstockError: the forward calls the points in another order, or gives a point no argument or a gradient
                that its part cannot get.
            _Stopped: the part ends here; the exception has its output.
        """
        self._require_next(name)
        self.position += 1
        value, further_args, further_kwargs = first_argument(args, kwargs, placeholder.module)
        self._note_arrival(name, value)
        if name == self.stop:
            # Only `value` goes on to the next part. A further argument would lose its gradient; it can need one in
            # the first part alone, which holds the parameters outside of the points.
            if self.start is None:
                refuse_gradients(name, (further_args, further_kwargs))
            raise _Stopped(value)
        if name == self.start:
            # What the forward has brought here has no values: the part's input, from another stage, takes its place.
            self.at_start()
            value = self.part_input
        if self.point_arguments is not None:
            self.point_arguments[name] = further_args, further_kwargs
        if name in self.part_modules:
            output = self._run_part_module(name, (value, *further_args), further_kwargs)
        else:
            output = self._placeholder_output(name, value, further_args, further_kwargs, placeholder)
        self.last_point = name, output, versions_of(output)
        return output

    def _require_next(self, name: str) -> None:
        """Refuse a call of the point `name` unless it is the next one of the cut. Raises: PenstockError."""
        position = self.position + 1
        if self.points[name] != position:
            expected = next((point for point in self.points if self.points[point] == position), "the end")
            raise PenstockError(f"the forward calls {name!r} where {expected!r} was expected; {POINT_ORDER}")

    def _note_arrival(self, name: str, value: Any) -> None:
        """Note whether the model's forward only hands `value` on to the point `name`, and in unchanged modes of torch.

        Where it does so at all points of a part, the part can run without the model's forward.
        """
        previous_point, previous_output, previous_versions = self.last_point
        # The same object, not changed in place meanwhile: the forward itself did nothing to it on the way.
        if previous_point and value is previous_output and previous_versions == versions_of(value):
            self.passing_points.add(previous_point)
        if not self.position:
            self.at_first_point()
        if modes_of(self.device) == self.modes:
            self.same_mode_points.add(name)

    def _placeholder_output(
        self, name: str, first: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder
    ) -> Any:
        """Return the output of a point of another part: tensors of the right shapes without values.

        `first` is the argument that goes from part to part, `rest` and `kwargs` are the further ones.
        """
        # Most blocks return a tensor like their input; to return the input itself saves a third of a run. Not where
        # missing values are followed: there each output has a tensor of its own, by which its origin is known.
        if self.missing is None and placeholder.returns_kind_of(first) and is_bare(first):
            return first
        inputs = rest, kwargs
        try:
            returned = placeholder.of((first, *rest), kwargs)
        except Exception:  # experts fail without values, which say their work; a block returns what is like its input
            returned = first
        placeholder.note_kind(first, returned)
        return self.without_value(returned, name, inputs)


class _StandIn(nn.Module):
    """Takes the place of a submodule; has its attributes, but none of its values."""

    def __init__(self, name: str, placeholder: Placeholder, frame: "Frame") -> None:
        super().__init__()
        # Past nn.Module's __setattr__, which would register the frame and the module as submodules.
        object.__setattr__(self, "_target", (name, placeholder, frame))
        # A model may ask its parameters for their device and dtype.
        for parameter_name, tensor in placeholder.module.named_parameters():
            self._parameters[parameter_name] = nn.Parameter(without_values(tensor, frame.device), requires_grad=False)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the module, for a forward that asks isinstance()."""
        return type(self._target[1].module)

    def __getattr__(self, name: str) -> Any:
        module_name, placeholder, frame = self._target
        if frame.course is not None and module_name in frame.course.part_modules:
            return getattr(frame.course.part_modules[module_name], name)
        value = getattr(placeholder.module, name)
        if isinstance(value, nn.Module):
            return _StandIn(f"{module_name}.{name}", Placeholder(value), frame)
        if frame.course is None:
            return without_values(value, frame.device)
        return frame.course.without_value(value, f"{module_name}.{name}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name, placeholder, frame = self._target
        course = frame.course
        if course is None:
            raise PenstockError(
                f"the stand-in of {name!r} is called outside of a forward; call the layers of the pipeline"
            )
        return course.call_module(name, args, kwargs, placeholder)


class Frame:
    """One thread's copy, on one device, of the modules around the points of a model."""

    def __init__(self, template: "Template", device: torch.device) -> None:
        """Copy the template onto `device`, with a stand-in in the place of each submodule that parts run."""
        self.device = device
        self.course: Course | None = None
        """The run that is under way; None between runs."""
        # deepcopy takes what `memo` has for a module in place of a copy.
        memo: dict[int, Any] = {
            id(module): _StandIn(name, template.placeholders[name], self) for name, module in template.modules.items()
        }
        self.model: nn.Module = copy.deepcopy(template.model, memo)
        template.complete(self.model, device)
        self.model.to(device).eval()
        # Tensors outside of the submodules: those that files have, and buffers of which each stage has a copy.
        self._saved_names = template.cut.tensors
        self._unsaved_buffers = {
            name: buffer for name, buffer in self.model.named_buffers() if name not in self._saved_names
        }
        self._modules = [module for module in self.model.modules() if not isinstance(module, _StandIn)]

    def run(self, call: Call, course: Course, tensors: Mapping[str, Tensor], *, is_training: bool) -> Any:
        """Run the model's forward between two points; return the output of the part.

        `course` says where the part begins and ends, and `tensors` are the part's parameters and buffers outside its
        modules. Random draws before the part begins, as of a dropout on another stage, are undone. Raises:
        PenstockError, where the forward is not what the cut says.
        """
        # The scope in which random draws are undone; it is closed where the part begins.
        generator_scope = ExitStack()
        # Buffers are compared with what they were: saved ones from the first point on, others from the begin.
        buffers_before: VersionedBuffers = {}
        course.at_first_point = lambda: buffers_before.update(self._saved_buffers())
        course.at_start, course.modes = generator_scope.close, modes_of(self.device)
        self.course = course
        versions_before = versions_of(self._unsaved_buffers)
        with self._with_tensors(tensors), generator_scope, course.missing or nullcontext():
            if course.missing is not None:  # follow what the forward computes from parameters of other parts
                for name in set(self._saved_names) - tensors.keys():
                    course.missing.mark(tensor_of(self.model, name), name)
            if course.start is not None:
                generator_scope.enter_context(_restored_generators(self.device))
            self._set_training(is_training)
            try:
                output = call(self.model)
                has_ended = True  # the forward came to its own end
            except _Stopped as stopped:  # the forward came to the point at which the part ends
                output, has_ended = stopped.output, False
            finally:
                self._set_training(False)
                self.course = None  # it holds what arrived
            _refuse_changed(buffers_before, self._saved_buffers())
            self._refuse_counters(versions_before)
        if has_ended and course.stop is not None:
            raise PenstockError(f"the forward has ended and has not called {course.stop!r}; {POINT_ORDER}")
        return output

    def _saved_buffers(self) -> VersionedBuffers:
        tensors = {name: tensor_of(self.model, name) for name in self._saved_names}
        buffers = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
        return {name: (buffer, versions_of(buffer)) for name, buffer in buffers.items()}

    def _refuse_counters(self, versions_before: tuple[int, ...]) -> None:
        """Refuse a change in place of a buffer of which each stage has a copy, and which no file has."""
        name_versions = zip(self._unsaved_buffers, versions_before, versions_of(self._unsaved_buffers), strict=True)
        changed = [name for name, version_before, version_after in name_versions if version_before != version_after]
        if changed:
            raise PenstockError(
                f"the forward changes the buffer {changed[0]!r} in place, of which each stage has a copy that sees "
                "other forwards; let a submodule hold it, which is a point of the cut, or make it anew in each forward"
            )

    def _set_training(self, is_training: bool) -> None:
        for module in self._modules:
            module.training = is_training

    @contextmanager
    def _with_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the frame have these tensors of the part inside, and its own ones again after it."""
        frame_tensors = {name: tensor_of(self.model, name) for name in tensors}
        for name, tensor in tensors.items():
            set_tensor(self.model, name, tensor)
        try:
            yield
        finally:
            for name, tensor in frame_tensors.items():
                _keep_change(tensors[name], tensor_of(self.model, name))
                set_tensor(self.model, name, tensor)


def modes_of(device: torch.device) -> tuple[Any, ...]:
    """Return torch's modes of this thread that change what a module computes."""
    kind = "cpu" if device.type == "meta" else device.type
    is_cast = torch.is_autocast_enabled(kind)
    return torch.is_grad_enabled(), is_cast, torch.get_autocast_dtype(kind) if is_cast else None


def _restored_generators(device: torch.device) -> AbstractContextManager[None]:
    """Leave torch's generators as they are, whatever is drawn inside."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


class Template:
    """The module that all copies of a frame are made from."""

    def __init__(
        self, model: nn.Module, cut: CutModel, complete: Callable[[nn.Module, torch.device], None] | None = None
    ) -> None:
        """Copy `model` without its submodules at and before the points of the `cut`; `model` itself stays as it is.

        `complete` gives values to the tensors of a copy that are on the meta device, if the model is there.
        """
        self.cut = cut
        self.positions = {name: position for position, name in enumerate(cut.points)}
        self.complete = complete or (lambda model, device: None)
        # Submodules that stand-ins replace; of those before the points, the ones with parameters come first.
        trained = [name for name in cut.begin_modules if any(True for _ in model.get_submodule(name).parameters())]
        names = [*trained, *(name for name in cut.begin_modules if name not in trained), *cut.points]
        self.placeholders = {name: Placeholder(on_meta(model.get_submodule(name))) for name in names}
        # Bare modules keep the places in which each frame puts its stand-ins.
        memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Module() for name in names}
        memo |= {id(tensor): _blank(tensor) for name in cut.tensors for tensor in [tensor_of(model, name)]}
        self.model: nn.Module = copy.deepcopy(model, memo)
        self.modules = {name: self.model.get_submodule(name) for name in names}


def _blank(tensor: Tensor) -> Tensor:
    """Return a copy of a parameter without its values; of a buffer with them, for a forward to compute with."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    return nn.Parameter(without_values(tensor.detach(), device), requires_grad=False)


@torch.no_grad()
def _keep_change(tensor: Tensor, new_tensor: Tensor) -> None:
    """Give a buffer the values of a new tensor that the forward has put in its place."""
    if new_tensor is not tensor:
        tensor.copy_(new_tensor)


def _refuse_changed(buffers_before: VersionedBuffers, buffers_after: VersionedBuffers) -> None:
    """Refuse a saved buffer that the forward changes where only the first layer holds it. Raises: PenstockError."""
    for name, (tensor, versions) in buffers_before.items():
        if buffers_after[name][0] is not tensor or buffers_after[name][1] != versions:
            raise PenstockError(
                f"the forward changes the buffer {name!r} behind its first point, but the first layer alone holds and "
                "saves it; let a submodule hold it, which is a point of the cut"
            )
