"""One run of a model's forward between two points of its cut, and how far it has come."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.missing import Missing
from penstock.models.cutting.placeholders import Placeholder, is_bare, tensors_in, versions_of, without_values
from penstock.models.cutting.points import first_argument, refuse_gradients

POINT_ORDER = "give the points of the cut in the order of the forward, in which each is called once"


class Stopped(BaseException):
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
            Stopped: the part ends here; the exception has its output.
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
            raise Stopped(value)
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


def modes_of(device: torch.device) -> tuple[Any, ...]:
    """Return torch's modes of this thread that change what a module computes."""
    kind = "cpu" if device.type == "meta" else device.type
    is_cast = torch.is_autocast_enabled(kind)
    return torch.is_grad_enabled(), is_cast, torch.get_autocast_dtype(kind) if is_cast else None
