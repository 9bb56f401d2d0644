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
from penstock.models.cutting.points import CutModel

ALIASED = "single memory location"
"""torch's words for a change in place of a tensor that is one number, expanded."""
SKIP = "hand the value on by a ps.Skip, which one point puts and others get, each within its submodule"
"""The way of a value past layers. The forward around the points runs on every stage, so a Skip is of no use there."""
Call = Callable[[nn.Module], Any]
"""Runs the forward of the module that it gets."""


class _Stopped(BaseException):
    """The forward has come to where the part ends; no `except Exception` of the module takes it."""

    def __init__(self, output: Any) -> None:
        self.output = output


@dataclass(slots=True)
class Course:
    """One run of the forward, and how it goes on where it meets stand-ins."""

    points: Mapping[str, int]
    """The places of the points in the forward."""
    device: torch.device
    start: str | None
    """The point at which the part begins; None: at the begin of the forward."""
    stop: str | None
    """The point at which it ends; None: at the end of the forward."""
    lent: Mapping[str, nn.Module]
    """The modules of the part."""
    arrived: Any = None
    """The input of the part, which takes the place of what its first module would get."""
    is_dense: bool = False
    missing: Missing | None = None
    """Finds what is computed from values that are not there, if that is wanted."""
    begin: Callable[[], None] = field(default=lambda: None)
    """Called where the part begins."""
    at_first_point: Callable[[], None] = field(default=lambda: None)
    """Called where the forward meets its first point."""
    notes: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """The arguments of each point besides the first one, if that is wanted."""
    met: list[str] | None = None
    """The modules that the forward has called, if that is wanted."""
    straight: set[str] = field(default_factory=set)
    """The points whose output came to the next point as it was."""
    plain: set[str] = field(default_factory=set)
    """The points that the forward calls in the modes in which it was called itself, as of gradients and autocast."""
    modes: tuple[Any, ...] = ()
    """Those modes."""
    place: int = -1
    """Of the last point that was met."""
    last: tuple[str, Any, tuple[int, ...]] = ("", None, ())
    """The last point that was met, what it returned, and how often that had been changed in place."""

    def restart(self, *, is_dense: bool) -> None:
        """Begin anew."""
        self.is_dense = is_dense
        self.place, self.last = -1, ("", None, ())
        self.straight.clear()
        self.plain.clear()

    @property
    def is_inside(self) -> bool:
        """Whether the part has begun."""
        return self.start is None or self.place >= self.points[self.start]

    def meet(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], like: Placeholder) -> Any:
        """Return what the forward gets from the module of this name."""
        if self.met is not None:
            self.met.append(name)
        if name in self.points:
            return self._meet_point(name, args, kwargs, like)
        if name in self.lent:
            return self._lend(name, args, kwargs)
        if self.is_inside and self.start is not None:
            raise PenstockError(
                f"the forward calls {name!r} behind {self.start!r}, though it is defined before; name it as a point of "
                "the cut, in the order of the forward"
            )
        return self.absent(like.of(args, kwargs), name, (args, kwargs))

    def absent(self, value: Any, origin: str, given: Any = ()) -> Any:
        """Return a tree like `value` of a submodule, without its values but for tensors that the module was `given`."""
        kept = tuple(tensors_in(given))
        output = without_values(value, self.device, is_dense=self.is_dense, kept=kept)
        if self.missing is not None:
            new = tuple(each for each in tensors_in(output) if not any(each is other for other in kept))
            self.missing.mark(new, origin)
        return output

    def _lend(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the part; what it computes inside is not followed."""
        missing = self.missing
        if missing is None:
            return self.lent[name](*args, **kwargs)
        origin = missing.origin_of((args, kwargs))
        with missing.paused():
            output = self.lent[name](*args, **kwargs)
        if origin is not None:
            missing.mark(output, origin)
        return output

    def _meet_point(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], like: Placeholder) -> Any:
        if self.points[name] != self.place + 1:
            expected = next((each for each, place in self.points.items() if place == self.place + 1), "the end")
            raise PenstockError(
                f"the forward calls {name!r} where {expected!r} was expected; give the points of the cut in the order "
                "of the forward, in which each is called once"
            )
        self.place += 1
        first, rest, kwargs = _first_argument(args, kwargs, like.module)
        before, returned, versions = self.last
        if before and first is returned and versions == versions_of(first):
            self.straight.add(before)
        if not self.place:
            self.at_first_point()
        if modes_of(self.device) == self.modes:
            self.plain.add(name)
        if name == self.stop:
            if self.start is None:
                _refuse_gradients(name, (rest, kwargs))
            raise _Stopped(first)
        if name == self.start:
            self.begin()
            first = self.arrived
        if self.notes is not None:
            self.notes[name] = rest, kwargs
        if name in self.lent:
            output = self._lend(name, (first, *rest), kwargs)
        else:
            output = self._like_output(name, first, rest, kwargs, like)
        self.last = name, output, versions_of(output)
        return output

    def _like_output(
        self, name: str, first: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], like: Placeholder
    ) -> Any:
        # Where values are followed, each has a tensor of its own, by which its origin is known.
        if self.missing is None and like.returns_kind_of(first) and is_bare(first):
            return first  # most blocks: this saves a third of a run
        given = rest, kwargs
        try:
            returned = like.of((first, *rest), kwargs)
        except Exception:  # as of experts, whose work depends on values: blocks return what they get
            returned = first
        like.note_kind(first, returned)
        return self.absent(returned, name, given)


class _StandIn(nn.Module):
    """Takes the place of a submodule; has its attributes, but none of its values."""

    def __init__(self, name: str, like: Placeholder, frame: "Frame") -> None:
        super().__init__()
        # Not as submodules: a copy of the frame is not one of these.
        object.__setattr__(self, "_place", (name, like, frame))
        for own, tensor in like.module.named_parameters():  # a model may ask its parameters for their device and type
            self._parameters[own] = nn.Parameter(without_values(tensor, frame.device), requires_grad=False)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the module, for a forward that asks isinstance()."""
        return type(self._place[1].module)

    def __getattr__(self, name: str) -> Any:
        place, like, frame = self._place
        if frame.course is not None and place in frame.course.lent:
            return getattr(frame.course.lent[place], name)
        value = getattr(like.module, name)
        if isinstance(value, nn.Module):
            return _StandIn(f"{place}.{name}", Placeholder(value), frame)
        if frame.course is None:
            return without_values(value, frame.device)
        return frame.course.absent(value, f"{place}.{name}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name, like, frame = self._place
        course = frame.course
        if course is None:
            raise PenstockError(
                f"the stand-in of {name!r} is called outside of a forward; call the layers of the pipeline"
            )
        return course.meet(name, args, kwargs, like)


class Frame:
    """One thread's copy, on one device, of the modules around the points of a model."""

    def __init__(self, template: "Template", device: torch.device) -> None:
        self.device = device
        self.course: Course | None = None
        memo: dict[int, Any] = {
            id(module): _StandIn(name, template.likes[name], self) for name, module in template.modules.items()
        }
        self.model: nn.Module = copy.deepcopy(template.model, memo)
        template.complete(self.model, device)
        self.model.to(device).eval()
        self._unheld = template.cut.tensors
        self._unsaved = {name: each for name, each in self.model.named_buffers() if name not in self._unheld}
        self._modules = [module for module in self.model.modules() if not isinstance(module, _StandIn)]

    def run(self, call: Call, course: Course, tensors: Mapping[str, Tensor], *, is_training: bool) -> Any:
        """Run the forward between two points.

        `tensors` are those of the part that the modules around the points hold. Draws of the forward before the part
        begins, as of a dropout on another stage, leave torch's generators as they were. Raises: PenstockError, where
        the forward is not what the cut says.
        """
        before = ExitStack()
        kept: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        course.at_first_point = lambda: kept.update(self._saved_buffers())
        course.begin, course.modes = before.close, modes_of(self.device)
        self.course = course
        unsaved = versions_of(self._unsaved)
        with self._holding(tensors), before, course.missing or nullcontext():
            if course.missing is not None:
                for name in set(self._unheld) - tensors.keys():
                    course.missing.mark(tensor_of(self.model, name), name)
            if course.start is not None:
                before.enter_context(_generators_kept(self.device))
            self._set_training(is_training)
            try:
                output = call(self.model)
                has_ended = True
            except _Stopped as stopped:
                output, has_ended = stopped.output, False
            finally:
                self._set_training(False)
                self.course = None  # it holds what arrived
            _refuse_changed(kept, self._saved_buffers())
            self._refuse_counters(unsaved)
        if has_ended and course.stop is not None:
            raise PenstockError(
                f"the forward has ended and has not called {course.stop!r}; give the points of the cut in the order of "
                "the forward, in which each is called once"
            )
        return output

    def _saved_buffers(self) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        own = {name: tensor_of(self.model, name) for name in self._unheld}
        return {name: (each, versions_of(each)) for name, each in own.items() if not isinstance(each, nn.Parameter)}

    def _refuse_counters(self, before: tuple[int, ...]) -> None:
        """Refuse a change in place of a buffer of which each stage has a copy, and which no file has."""
        pairs = zip(self._unsaved, before, versions_of(self._unsaved), strict=True)
        changed = [name for name, one, other in pairs if one != other]
        if changed:
            raise PenstockError(
                f"the forward changes the buffer {changed[0]!r} in place, of which each stage has a copy that sees "
                "other forwards; let a submodule hold it, which is a point of the cut, or make it anew in each forward"
            )

    def _set_training(self, is_training: bool) -> None:
        for module in self._modules:
            module.training = is_training

    @contextmanager
    def _holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        own = {name: tensor_of(self.model, name) for name in tensors}
        for name, tensor in tensors.items():
            set_tensor(self.model, name, tensor)
        try:
            yield
        finally:
            for name, tensor in own.items():
                _keep_change(tensors[name], tensor_of(self.model, name))
                set_tensor(self.model, name, tensor)


def modes_of(device: torch.device) -> tuple[Any, ...]:
    """Return torch's modes of this thread that change what a module computes."""
    kind = "cpu" if device.type == "meta" else device.type
    is_cast = torch.is_autocast_enabled(kind)
    return torch.is_grad_enabled(), is_cast, torch.get_autocast_dtype(kind) if is_cast else None


def _generators_kept(device: torch.device) -> AbstractContextManager[None]:
    """Leave torch's generators as they are, whatever is drawn inside."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


class Template:
    """The module that all copies of a frame are made from."""

    def __init__(
        self, model: nn.Module, cut: CutModel, complete: Callable[[nn.Module, torch.device], None] | None = None
    ) -> None:
        """`complete` gives values to what is left on the meta device, if the model is there."""
        self.cut = cut
        self.places = {name: place for place, name in enumerate(cut.points)}
        self.complete = complete or (lambda model, device: None)
        blank = [name for name in cut.before if any(True for _ in model.get_submodule(name).parameters())]
        names = [*blank, *(name for name in cut.before if name not in blank), *cut.points]
        self.likes = {name: Placeholder(on_meta(model.get_submodule(name))) for name in names}
        # Bare modules keep the places in which each frame puts its stand-ins.
        memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Module() for name in names}
        memo |= {id(tensor): _blank(tensor) for name in cut.tensors for tensor in [tensor_of(model, name)]}
        self.model: nn.Module = copy.deepcopy(model, memo)
        self.modules = {name: self.model.get_submodule(name) for name in names}


def _blank(tensor: Tensor) -> Tensor:
    """A parameter without values; a buffer keeps them, so that a forward may compute with them."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    return nn.Parameter(without_values(tensor.detach(), device), requires_grad=False)


def _first_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    if not kwargs:
        raise PenstockError(f"a {type(module).__name__} is called without arguments; a point takes what came before it")
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


def _refuse_gradients(name: str, others: Any) -> None:
    for where, value in (*enumerate(others[0], start=1), *others[1].items()):
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            raise PenstockError(
                f"{name!r} gets a gradient for its argument {where!r}, which is made before it, and a part passes on "
                f"its first argument alone; {SKIP}"
            )


@torch.no_grad()
def _keep_change(tensor: Tensor, now: Tensor) -> None:
    """Give a buffer the values of a new tensor that the forward has put in its place."""
    if now is not tensor:
        tensor.copy_(now)


def _refuse_changed(
    before: Mapping[str, tuple[Tensor, tuple[int, ...]]], after: Mapping[str, tuple[Tensor, tuple[int, ...]]]
) -> None:
    for name, (tensor, versions) in before.items():
        if after[name][0] is not tensor or after[name][1] != versions:
            raise PenstockError(
                f"the forward changes the buffer {name!r} behind its first point, but the first layer alone holds and "
                "saves it; let a submodule hold it, which is a point of the cut"
            )


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of a full name."""
    path, _, own = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), own)
    return found


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer of a full name."""
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, tensor)
