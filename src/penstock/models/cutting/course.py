"""`Course`: one run of the forward for a part, from its point to the next one, with the part's own submodules."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.labels import Labels, maker_of
from penstock.models.cutting.local_calls import call_module
from penstock.models.cutting.part_leaves import PartLeaves
from penstock.models.cutting.placeholders import DELETED, Placeholder, without_values
from penstock.models.cutting.points import first_argument
from penstock.models.cutting.routes import Routes, is_input_label
from penstock.models.cutting.trees import map_tensors, tensors_in


class Stopped(BaseException):
    """The forward has come to where the part ends; no `except Exception` of the module takes it."""

    def __init__(self, output: Any) -> None:
        self.output = output


@dataclass(slots=True, eq=False)
class Course:
    """One run of the forward for a part, and how far it has come: stand-ins ask it for what they return."""

    positions: Mapping[str, int]
    """The positions of the points in the forward, by name."""
    device: torch.device
    start: str | None
    """The point at which the part begins; None: at the begin of the forward."""
    stop: str | None
    """The point at which the part ends; None: at the end of the forward."""
    part_modules: Mapping[str, nn.Module]
    """The submodules of the part, which run in place of their stand-ins."""
    routes: Routes
    part_input: Any
    """The input of the part, which takes the place of what its first submodule would get."""
    leaves: PartLeaves
    at_start: Callable[[], None]
    """Called where the part begins."""
    labels: Labels = field(init=False)
    place: str = field(init=False)
    """The code that runs, for messages."""
    position: int = -1
    """The position of the last point that the forward has called; -1 before the first."""
    _num_calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.labels = Labels(self, self.device)
        self.place = f"from {self.start or 'its begin'!r} to {self.stop or 'its end'!r}"

    @property
    def is_inside(self) -> bool:
        """Whether the part has begun."""
        return self.start is None or self.position >= self.positions[self.start]

    def batch_leaf(self, name: str, tensor: Tensor) -> Tensor:
        """Return an argument of the batch that the first stage alone is given: `tensor` is it, or has its shape."""
        if self.start is None:
            self.leaves.keep(name, tensor)
            return tensor
        return self._arriving(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))

    def require_values(self, value: Any, place: str) -> None:
        """Refuse a value that depends on what is not here. Raises: PenstockError."""
        labels = self.labels.labels_of(value)
        if labels:
            raise _lack(labels, place)

    # ---- what operators do

    def use_labels(self, labels: frozenset[str]) -> None:
        """Refuse code of the part that computes from what is not here. Raises: PenstockError."""
        if self.is_inside:
            raise _lack(labels, "what the forward computes")

    def draw(self, label: str, compute: Callable[[], Any]) -> tuple[Any, bool]:
        """Draw within the part; before it, return what arrived, or a result without values."""
        if self.is_inside:
            output = compute()
            self.leaves.keep(label, output)
            return output, True
        if label in self.leaves.arrived:
            return self.leaves.arrived[label], True
        return compute(), False

    # ---- what stand-ins are asked

    def call_method(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder
    ) -> Any:
        """Return what the forward gets from a submodule: run it, or return what arrived of it.

        Raises:
            Stopped: the part ends here; the exception has its output.
        """
        args, kwargs = self.labels.replaced((args, kwargs))
        if name in self.positions:
            args, kwargs = self._at_point(name, args, kwargs, placeholder)
        label = f"{name}#{self._num_calls[name]}"
        self._num_calls[name] += 1
        if name in self.part_modules and self.is_inside:
            self.require_values((args, kwargs), f"an argument of {name!r}")
            with self.labels.paused():
                output = call_module(self.part_modules[name], name, method, args, kwargs, self.routes)
            require_kinds(label, output, self.routes)
            self.leaves.keep_output(label, output)
            return output
        output, input_ids = self.routes.outputs.get(label), set()
        if output is None:
            input_ids = set(map(id, tensors_in((args, kwargs))))
            with self.labels.paused():
                output = placeholder.output(method, args, kwargs, is_training=True)
        next_index = count()

        def arriving(tensor: Tensor) -> Tensor:
            index = next(next_index)
            return tensor if id(tensor) in input_ids else self._arriving(f"{label}.{index}", tensor)

        return map_tensors(arriving, output)

    def local_module(self, name: str) -> nn.Module | None:
        """Return the submodule itself where the part has it."""
        holder = next((point for point in self.part_modules if f"{name}.".startswith(f"{point}.")), None)
        if holder is None:
            return None
        return self.part_modules[holder].get_submodule(name[len(holder) + 1 :])

    def tensor_attribute(self, label: str, tensor: Tensor) -> Tensor:
        """Return a tensor that a submodule of another part holds, if it has arrived."""
        return self._arriving(label, without_values(tensor, requires_grad=False))

    def note_read(self, name: str, attribute: str) -> None:
        """Make sure that a run without values has read it too. Raises: PenstockError."""
        if attribute not in self.routes.reads.get(name, ()):
            raise PenstockError(
                f"the forward reads {attribute!r} of {name!r}, which a run without values did not; all that it decides "
                "by must follow from the batch"
            )

    def write(self, name: str, attribute: str, value: Any, placeholder: Placeholder) -> None:
        """Set an attribute of a submodule of the part. Raises: PenstockError, if its value is not here."""
        module = self.local_module(name)
        if module is None:
            with self.labels.paused():
                placeholder.write(attribute, value)
        elif value is DELETED:
            delattr(module, attribute)
        else:
            value = self.labels.replaced(value)
            self.require_values(value, f"the attribute {attribute!r} of {name!r}")
            setattr(module, attribute, value)

    # ---- the way of the forward

    def _at_point(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a point, the first one as it arrived; or stop the forward there."""
        self.position += 1
        if self.positions[name] != self.position:
            raise PenstockError(f"the forward calls {name!r} in another order than a run of it without values")
        first, further_args, further_kwargs = first_argument(args, kwargs, placeholder.owner)
        labels = self.routes.points[self.position].input_labels
        inputs = [(label, tensor) for label, tensor in zip(labels, tensors_in(first), strict=True) if label is not None]
        if name == self.stop or (self.is_inside and name != self.start):
            self.require_values(first, f"what comes to {name!r}")
            for label, tensor in inputs:
                self.leaves.keep(label, tensor)
        else:
            self._replace_inputs(name, inputs)
        if name == self.stop:
            raise Stopped(first)
        if name == self.start:
            # What the forward has brought here has no values: the part's input, from another stage, takes its place.
            self.at_start()
            if args:
                return (self.part_input, *further_args), further_kwargs
            return (), {**{next(iter(kwargs)): self.part_input}, **further_kwargs}
        return args, kwargs

    def _replace_inputs(self, name: str, inputs: list[tuple[str, Tensor]]) -> None:
        """Let what the forward has computed for a point be a leaf from here on, as far as it has arrived."""
        for label, tensor in inputs:
            if is_input_label(name, label):
                with self.labels.paused():
                    bare = without_values(tensor)
                self.labels.replace(tensor, self._arriving(label, bare))

    def _arriving(self, label: str, bare: Tensor) -> Tensor:
        """Return a leaf that arrived, or one without values."""
        if label in self.leaves.arrived:
            return self.leaves.arrived[label]
        self.labels.add_leaf(bare, label)
        return bare


def _lack(labels: frozenset[str], place: str) -> PenstockError:
    return PenstockError(
        f"{place} depends on {maker_of(min(labels))!r}, which a layer of another stage computes or holds, and which a "
        "run without values did not use; all that the forward decides by must follow from the batch"
    )


def require_kinds(label: str, output: Any, routes: Routes) -> None:
    """Refuse what the call `label` of a submodule returns, if a run without values has found other shapes or types.

    Raises:
        PenstockError: it names the submodule.
    """
    tensors = tensors_in(output)
    shapes, expected_shapes = tuple(tuple(tensor.shape) for tensor in tensors), routes.shapes[label]
    if shapes != expected_shapes:
        raise PenstockError(
            f"{maker_of(label)!r} returns tensors of the shapes {list(shapes)}; expected {list(expected_shapes)}, as "
            "in a run without values. What a submodule returns must have shapes that follow from those of its inputs"
        )
    for index, tensor in enumerate(tensors):
        expected_type = routes.types.get(f"{label}.{index}", tensor.dtype)
        if tensor.dtype is not expected_type:
            raise PenstockError(
                f"{maker_of(label)!r} returns {tensor.dtype} where a run without values found {expected_type}, as "
                "under autocast, and the forward around the points asks for its dtype; give the dtype there by name"
            )
