"""`Trial`: one run of a model's forward without values, in which every submodule of a part is a stand-in.

It finds the `Routes` of a microbatch. Each stage runs it for each microbatch, so that a forward may go another way in
one microbatch than in another.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.draws import UnknownDraws
from penstock.models.cutting.labels import Labels
from penstock.models.cutting.placeholders import Placeholder, without_values
from penstock.models.cutting.points import first_argument
from penstock.models.cutting.routes import ArgumentForms, PointRoute, Routes, carry, form_of, input_label, short_points
from penstock.models.cutting.stand_in import CALL
from penstock.models.cutting.trees import map_tensors, tensors_in

POINT_ORDER = "give the points of the cut in the order of the forward, in which each is called once"
LEFT_OUT = "A block that some batches leave out, as by a layer drop, cannot be a point"


@dataclass(slots=True, eq=False)
class Trial:
    """A run that notes what each segment of the forward needs; a segment is the code from a point to the next one."""

    positions: Mapping[str, int]
    """The positions of the points in the forward, by name."""
    device: torch.device
    is_training: bool
    modules: Mapping[str, nn.Module]
    """The submodules that parts run, by name."""
    model_name: str
    """The class of the model, for messages."""
    has_free_order: bool = False
    """Whether the forward may call the submodules in any order."""
    at_first_point: Callable[[], None] = lambda: None
    """Called where the forward meets its first point."""
    labels: Labels = field(init=False)
    place: str = field(init=False)
    """The code that runs now, for messages."""
    segment: int = 0
    unknown_draws: UnknownDraws = field(default_factory=UnknownDraws)
    """Finds draws that are not followed."""
    _points: list[PointRoute] = field(default_factory=list)
    _needs: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    _made_in: dict[str, int] = field(default_factory=dict)
    _num_calls: Counter[str] = field(default_factory=Counter)
    _shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    _outputs: dict[str, Any] = field(default_factory=dict)
    _types: dict[str, torch.dtype] = field(default_factory=dict)
    _reads: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _written: set[str] = field(default_factory=set)
    _argument_forms: ArgumentForms = field(default_factory=ArgumentForms)
    _modes: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.labels = Labels(self, self.device)
        self._modes = modes_of(self.device)
        self.place = f"in the forward of {self.model_name} before its first point"

    def add_saved_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Label the parameters and saved buffers around the points, which what runs before the first point holds."""
        for name, tensor in tensors.items():
            self.labels.add_leaf(tensor, name)
            self._made_in[name] = 0

    def batch_leaf(self, name: str, tensor: Tensor) -> Tensor:
        """Return a stand-in for an argument of the batch that the first stage alone is given."""
        bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.labels.add_leaf(bare, name)
        self._made_in[name] = 0
        return bare

    def finish(self, output: Any) -> Routes:
        """Return what was found; `output` is that of the forward. Raises: PenstockError."""
        self.use_labels(self.labels.labels_of(self.labels.replaced(output)))
        missing_names = [name for name in self.positions if name not in self._num_calls]
        if missing_names and not self.has_free_order:
            raise PenstockError(
                f"the forward has ended and has not called {missing_names[0]!r}; {POINT_ORDER}. {LEFT_OUT}"
            )
        carry(self._points, self._needs, self._made_in, self.labels.changed_labels)
        changed = self.labels.changed_labels
        short = short_points(self._points, changed, self._written)
        types = {label: self._types[label] for label in self.labels.typed_labels if label in self._types}
        return Routes(self._points, frozenset(changed), self._shapes, self._outputs, types, self._reads, short)

    # ---- what operators do

    def use_labels(self, labels: frozenset[str]) -> None:
        """Note that the current segment needs leaves."""
        if labels:
            self._needs[self.segment] |= labels

    def draw(self, label: str, compute: Callable[[], Any]) -> tuple[Any, bool]:
        """Note a random draw of the current segment."""
        self._made_in[label] = self.segment
        with self.unknown_draws.expected():
            return compute(), False

    # ---- what stand-ins are asked

    def call_method(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder
    ) -> Any:
        """Return what a submodule returns, without values; each of its new tensors is a leaf.

        Raises:
            PenstockError: the forward calls something out of order, or a part of a submodule.
        """
        args, kwargs = self.labels.replaced((args, kwargs))
        if name not in self.modules or (name in self.positions and method not in (CALL, "forward")):
            whole = next((point for point in self.modules if name == point or name.startswith(f"{point}.")), name)
            raise PenstockError(
                f"the forward calls {name!r}{'' if method == CALL else '.' + method} by itself, but the stage of "
                f"{whole!r} runs it as a whole; cut at what the forward calls"
            )
        if name in self.positions:
            self._begin_point(name, method, args, kwargs, placeholder)
        elif self.segment and not self.has_free_order:
            raise PenstockError(
                f"the forward calls {name!r} behind {self._points[-1].name!r}, though it is defined before; name it as "
                "a point of the cut, in the order of the forward"
            )
        else:
            self.use_labels(self.labels.labels_of((args, kwargs)))
        label = f"{name}#{self._num_calls[name]}"
        self._num_calls[name] += 1
        with self.labels.paused(), self.unknown_draws.expected():
            output = placeholder.output(method, args, kwargs, is_training=self.is_training)
        return self._labelled(name, label, output, (args, kwargs))

    def local_module(self, name: str) -> nn.Module | None:
        """A trial has no submodules."""
        return None

    def tensor_attribute(self, label: str, tensor: Tensor) -> Tensor:
        """Return a tensor that a submodule holds, as a leaf without values."""
        module_name = next((name for name in self.modules if label.startswith(f"{name}.")), "")
        bare = without_values(tensor, requires_grad=False).requires_grad_(tensor.requires_grad)
        self.labels.add_leaf(bare, label)
        self._made_in[label] = self.positions.get(module_name, -1) + 1
        return bare

    def note_read(self, name: str, attribute: str) -> None:
        """Note that the forward reads an attribute that is no tensor."""
        self._reads[name].add(attribute)

    def write(self, name: str, attribute: str, value: Any, placeholder: Placeholder) -> None:
        """Set an attribute; the part of the submodule needs its leaves.

        Raises:
            PenstockError: the part has run, and would see it one microbatch later, or never.
        """
        holder = next((point for point in self.modules if f"{name}.".startswith(f"{point}.")), name)
        own_segment = self.positions.get(holder, -1) + 1
        if self.segment > own_segment:
            raise PenstockError(
                f"the forward sets {attribute!r} of {name!r} behind the code of its stage, which does not see it; keep "
                "the value in a variable, or set it before the call"
            )
        self._written.add(holder)
        self._reads[name].add(attribute)  # as far as the next reading: the submodule itself must leave it alone
        value = self.labels.replaced(value)
        self._needs[own_segment] |= self.labels.labels_of(value)
        with self.labels.paused():
            placeholder.write(attribute, value)

    # ---- points

    def _begin_point(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder
    ) -> None:
        """Note the arguments of a point, with which a new segment begins."""
        if not self.has_free_order and self.positions[name] != self.segment:
            expected = next((point for point, place in self.positions.items() if place == self.segment), "the end")
            if name in self._num_calls:
                raise PenstockError(
                    f"the forward calls {name!r} a second time, where {expected!r} was expected; a point is called "
                    "once, so put a block that is shared into one submodule with what calls it"
                )
            raise PenstockError(
                f"the forward calls {name!r} where {expected!r} was expected, which it leaves out or calls later; "
                f"{POINT_ORDER}. {LEFT_OUT}"
            )
        first, further_args, further_kwargs = first_argument(args, kwargs, placeholder.owner)
        input_form = form_of(first, self.labels)
        argument_form = self._argument_forms.form(further_args, further_kwargs, self.labels)
        self.use_labels(input_form.labels)
        if not self.segment:
            self.at_first_point()
        input_labels = tuple(self._input_label(name, *item) for item in enumerate(tensors_in(first)))
        self.segment += 1
        self.place = f"in the forward of {self.model_name} behind {name!r}"
        self.use_labels(argument_form.labels)
        runs_alone = method == CALL and modes_of(self.device) == self._modes
        first_keyword = None if args else next(iter(kwargs))
        self._points.append(
            PointRoute(name, input_form, argument_form, runs_alone, first_keyword, input_labels=input_labels)
        )

    def _input_label(self, name: str, index: int, tensor: Tensor) -> str | None:
        """Return the label of a tensor of the first argument of a point.

        One that is computed is a leaf from here on: the part gets it as its input, and need not compute it again for
        what the forward adds to it behind the point.
        """
        label = self.labels.leaf_label(tensor)
        if label is not None or not self.labels.labels_of(tensor):
            return label
        label = input_label(name, index)
        with self.labels.paused():
            leaf = without_values(tensor)
        self.labels.add_leaf(leaf, label)
        self.labels.replace(tensor, leaf)
        self._made_in[label] = self.segment
        return label

    def _labelled(self, name: str, label: str, output: Any, inputs: Any) -> Any:
        """Label the tensors of an output that are not among the inputs; return the output."""
        input_ids = set(map(id, tensors_in(inputs)))
        tensors = tensors_in(output)
        with self.labels.paused():  # the forward has not asked for them
            self._shapes[label] = tuple(tuple(tensor.shape) for tensor in tensors)
            types = [tensor.dtype for tensor in tensors]
        labels: list[str | None] = []
        for index, tensor in enumerate(tensors):
            labels.append(None if id(tensor) in input_ids else f"{label}.{index}")
            if id(tensor) not in input_ids:
                self.labels.add_leaf(tensor, f"{label}.{index}")
                self._made_in[f"{label}.{index}"] = self.segment
                self._types[f"{label}.{index}"] = types[index]
        if None not in labels:
            self._outputs[label] = map_tensors(lambda tensor: tensor, output)  # the forward may change its containers
        if name in self.positions:
            self._points[-1].output_labels = tuple(labels)
        return output


def modes_of(device: torch.device) -> tuple[Any, ...]:
    """Return torch's modes of this thread that change what a module computes."""
    kind = "cpu" if device.type == "meta" else device.type
    is_cast = torch.is_autocast_enabled(kind)
    return torch.is_grad_enabled(), is_cast, torch.get_autocast_dtype(kind) if is_cast else None
