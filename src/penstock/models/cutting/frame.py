"""A module without its parts: its forward runs between two of them, with stand-ins for all that others have.

    Model.forward    embedding      blocks.0       blocks.1       norm       head
    part `blocks.1`  stand-in ...   stand-in ...   the block  ──► stop: what norm would get is the part's output

The forward is the module's own, so masks, positions and whatever else a part is given are made as the module makes
them. A stand-in returns tensors without values (placeholders.py), which need no gradient.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.course import POINT_ORDER, Course, Stopped, modes_of
from penstock.models.cutting.placeholders import Placeholder, on_meta, versions_of, without_values
from penstock.models.cutting.points import CutModel, set_tensor, tensor_of

ALIASED = "single memory location"
"""torch's words for a change in place of a tensor that is one number, expanded."""
Call = Callable[[nn.Module], Any]
"""Runs the forward of the module that it gets."""
VersionedBuffers = dict[str, tuple[Tensor, tuple[int, ...]]]
"""Buffers by name, with how often they were changed in place."""


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
            except Stopped as stopped:  # the forward came to the point at which the part ends
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
