"""Follows from what each value around the submodules of a forward is computed.

    hidden = self.words(tokens)          leaf  words#0.0
    kept = hidden.sum(-1) > 0            needs words#0.0
    hidden = self.blocks[0](hidden)      leaf  blocks.0#0.0

A *leaf* is a tensor that something other than the code around the submodules makes: a submodule (module, number of the
call, index of the tensor in what it returns), a parameter, or a random draw. Its label is a text that all stages agree
on. Values with labels are not there: they are on the meta device, where operators find shapes, types, strides and
graphs without values and at no cost. Values without labels follow from the batch, and are computed as they are.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.errors import PenstockError
from penstock.models.cutting.draws import PAIRS, draws_in_place, is_draw
from penstock.models.cutting.label_table import NO_LABELS, LabelTable
from penstock.models.cutting.trees import map_tensors, tensors_in
from penstock.models.cutting.undocumented import version_of

DRAW = "draw"
"""The first word of the labels of random draws."""
FILLS = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"),
}
"""Functions that take shape, type and device of a tensor alone."""
LIKE_SECOND = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""Functions that take shape, type and device of their second tensor alone."""
FORMS = {
    *("untyped_storage", "storage", "data_ptr", "storage_offset", "dim", "ndimension", "size", "numel", "nelement"),
    *("stride", "is_contiguous", "is_floating_point", "is_complex", "is_inference", "element_size", "__len__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "has_names"),
}
"""Functions that say or set what a tensor is besides its values."""
HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
"""Functions that change the gradients of a tensor."""
PRODUCTS = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
}
"""Functions whose results have the type of autocast."""
READS = {
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__", "item", "tolist"),
    *("numpy", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select", "unique"),
    *("unique_consecutive", "bincount"),
}
"""Functions that make a Python value or a shape of values, by which a forward may go on in another way."""


class Watch(Protocol):
    """A run of the forward that is told what its operators do."""

    @property
    def place(self) -> str:
        """The code that runs now, for messages."""

    def use_labels(self, labels: frozenset[str]) -> None:
        """Note that an operator has computed from leaves of these labels."""

    def draw(self, label: str, compute: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result of a random draw, and whether its values are there."""


class Labels(LabelTable, TorchFunctionMode):
    """Labels what is computed while it is entered."""

    def __init__(self, watch: Watch, device: torch.device) -> None:
        """`device` is where values with labels would be."""
        super().__init__()
        self._watch, self._device = watch, device
        self._num_draws = 0
        self._replacements: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of the forward, by id, in whose place operators get another one."""
        self.refusal: PenstockError | None = None
        """The first error by which an operator was refused, which the forward may have caught."""
        self.owner_parameters: Mapping[int, tuple[Any, str]] = {}
        """Parameters that the forward may not use, since its modules here have others: a weak reference and the name
        of each, by id."""

    def replace(self, tensor: Tensor, replacement: Tensor) -> None:
        """Let operators and submodules get another tensor wherever the forward hands on this one."""
        self._replacements[id(tensor)] = tensor, replacement  # kept, so that no other tensor gets this id

    def replaced(self, value: Any) -> Any:
        """Return a tree with the replacements of its tensors."""
        if not self._replacements:
            return value
        return map_tensors(lambda tensor: self._replacements.get(id(tensor), (tensor, tensor))[1], value)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave operators alone inside, where the mode is entered."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._follow(func, args, kwargs or {})
        except PenstockError as error:
            self.refusal = self.refusal or error
            raise

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of the forward, or of what it calls."""
        args, kwargs = self.replaced((args, kwargs))
        name = getattr(func, "__name__", "").partition(".")[0]  # an overload of torch.ops is called `rand_like.default`
        if name == "__get__":
            return self._read_attribute(func, args, kwargs)
        if name in HOOKS or (name == "__set__" and getattr(func.__self__, "__name__", "") in ("data", "grad")):
            refuse_hidden_change(func, self.labels_of(args), self._watch.place)
        if name in FORMS:
            return func(*args, **kwargs)
        if self.owner_parameters:
            refuse_parameters(self.owner_parameters, (args, kwargs), self._watch.place)
        if is_draw(name, args, kwargs):
            return self._draw(func, name, args, kwargs)
        labels = self.labels_of((args, kwargs))
        if not labels:
            return func(*args, **kwargs)
        if name in FILLS:
            self.typed_labels |= labels
            return func(*args, **{"device": self._device, **kwargs})
        if name == "get_device":
            return -1 if self._device.type == "cpu" else (self._device.index or 0)
        if name in LIKE_SECOND and len(args) == 2 and not self.labels_of(args[0]):
            self.typed_labels |= labels
            return self._like_second(name, *args, **kwargs)
        if name in READS or (name == "__getitem__" and self._selects_by_values(args[1])):
            raise PenstockError(decides_by_value(name, labels, self._watch.place))
        return self._compute(func, args, kwargs, labels)

    def _compute(self, func: Any, args: Any, kwargs: Any, labels: frozenset[str]) -> Any:
        """Run an operator without values; label what it returns, and what it changes in place."""
        tensors = tensors_in((args, kwargs))
        # Constants go to the meta device for the operator, which takes no tensors of several devices.
        meta_by_id = {id(tensor): tensor if tensor.is_meta else tensor.to("meta") for tensor in tensors}
        versions = [version_of(meta_by_id[id(tensor)]) for tensor in tensors]
        meta_args, meta_kwargs = map_tensors(lambda tensor: meta_by_id[id(tensor)], (args, kwargs))
        output = self._run(func, meta_args, meta_kwargs, (args, kwargs))
        is_used = False
        for tensor, version in zip(tensors, versions, strict=True):
            if version_of(meta_by_id[id(tensor)]) != version:
                is_used = True
                self.note_change(tensor, labels)
        output = self._as_autocast(getattr(func, "__name__", ""), output)
        for tensor in tensors_in(output):
            is_used = True
            self.add_labels(tensor, labels)
        if is_used:
            self._watch.use_labels(labels)
        return output

    def _as_autocast(self, name: str, output: Any) -> Any:
        """Return an output of the type that it has under autocast, which leaves the meta device alone."""
        kind = self._device.type
        if name not in PRODUCTS or not torch.is_autocast_enabled(kind):
            return output
        return output.to(torch.get_autocast_dtype(kind))

    def _run(self, func: Any, args: Any, kwargs: Any, original: Any = None) -> Any:
        """Run an operator on the meta device; `original` are the arguments with the values of constants."""
        if "device" in kwargs:  # the result goes nowhere: it is not there
            kwargs = kwargs | {"device": "meta"}
        args = tuple(torch.device("meta") if isinstance(item, torch.device) else item for item in args)
        name = getattr(func, "__name__", "")
        if name in ("cpu", self._device.type):
            return args[0]
        if name == "to":
            args = tuple("meta" if isinstance(item, str) else item for item in args)
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # an operator whose result has a shape that values decide, as h[mask]
            dense_args, dense_kwargs = map_tensors(_dense, original or (args, kwargs))
            return map_tensors(lambda tensor: tensor.to("meta"), func(*dense_args, **dense_kwargs))

    def _draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Label a random draw as a leaf: one process draws once, so one part draws, and the others get its result."""
        if name in PAIRS:
            raise PenstockError(
                f"{self._watch.place}, {name}() draws two tensors, which are not followed; draw by "
                "torch.nn.functional.dropout or torch.bernoulli"
            )
        labels = self.labels_of((args, kwargs))
        if labels:
            self._watch.use_labels(labels)
        label = f"{DRAW} {name} {self._num_draws}"
        self._num_draws += 1
        is_fill = name in FILLS

        def compute() -> Any:
            if not labels:
                return func(*args, **kwargs)
            if is_fill:
                return func(*args, **{"device": self._device, **kwargs})
            meta_args, meta_kwargs = map_tensors(
                lambda tensor: tensor if tensor.is_meta else tensor.to("meta"), (args, kwargs)
            )
            return self._run(func, meta_args, meta_kwargs)

        output, has_values = self._watch.draw(label, compute)
        if draws_in_place(name, args, kwargs):
            # Functions of torch.nn.init get it by name.
            target = tensors_in((kwargs["out"] if kwargs.get("out") is not None else args, kwargs))[0]
            return self._drawn_in_place(target, output, label, has_values=has_values)
        if has_values:
            return output
        output = output if output.is_meta else output.to("meta")
        self.add_leaf(output, label)
        return output

    def _drawn_in_place(self, target: Tensor, output: Tensor, label: str, *, has_values: bool) -> Tensor:
        if output is not target:
            target.copy_(output)
        if not has_values:
            self.note_change(target, NO_LABELS)
            earlier_labels = self.labels_of(target)  # of what lies beside it in its memory, where it is a view
            self.add_leaf(target, label)
            self.add_labels(target, earlier_labels)
        return target

    def _read_attribute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an attribute of a tensor; one without values says that it is on the device where it would be."""
        name = getattr(func.__self__, "__name__", "")
        if name in ("device", "is_meta", f"is_{self._device.type}"):
            if not self.labels_of(args[0]):
                return func(*args, **kwargs)
            return self._device if name == "device" else name != "is_meta"
        value = func(*args, **kwargs)
        if name == "dtype":
            self.typed_labels |= self.labels_of(args[0])
        if isinstance(value, Tensor) and (labels := self.labels_of(args[0])):
            self._watch.use_labels(labels)
            self.set_labels(value, labels)
        return value

    def _like_second(self, name: str, tensor: Tensor, like: Any, **kwargs: Any) -> Any:
        if name in ("to", "type_as"):
            return tensor.to(self._device, like.dtype, **kwargs)
        shape = like.shape if isinstance(like, Tensor) else like
        return tensor.expand(shape) if name == "expand_as" else tensor.reshape(shape)

    def _selects_by_values(self, index: Any) -> bool:
        """Whether an index selects by booleans that are not there, so that the shape of the result is not known."""
        return any(
            tensor.dtype in (torch.bool, torch.uint8) and self._labels_of(tensor) for tensor in tensors_in((index,))
        )


def _dense(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu().clone()


def decides_by_value(name: str, labels: Collection[str], place: str) -> str:
    """Return the words for a forward that reads a value which only one stage has."""
    label = min(labels)
    fix = "all that it decides by must follow from the batch"
    if label.startswith(DRAW):
        fix = "all stages must go the same way, so set the probability of a layer drop to 0"
    return (
        f"{place}, the forward decides by the value of a tensor ({name}) that a layer of another stage computes or "
        f"draws, {maker_of(label)!r}; {fix}"
    )


def refuse_parameters(names: Mapping[int, tuple[Any, str]], value: Any, place: str) -> None:
    """Refuse parameters that come past the attributes of modules. Raises: PenstockError."""
    for tensor in tensors_in(value):
        reference, name = names.get(id(tensor), (None, ""))
        if reference is not None and reference() is tensor:
            raise PenstockError(
                f"{place}, the forward uses the parameter {name!r} by a function or weak reference that holds the "
                "model or the parameter itself, which other stages do not train; read it from self in a method of the "
                "model"
            )


def refuse_hidden_change(func: Any, labels: Collection[str], place: str) -> None:
    """Refuse what changes a tensor past its operators, where parts would differ in it. Raises: PenstockError."""
    if labels and func.__name__ in HOOKS:
        raise PenstockError(
            f"{place}, {func.__name__}() is called on a tensor that follows from {maker_of(min(labels))!r}, but each "
            "stage has a part of its gradient alone; register the hook in a submodule that is a point of the cut, or "
            "use a torch.autograd.Function"
        )
    if labels:
        raise PenstockError(
            f"{place}, the forward sets .{func.__self__.__name__} of a tensor by what follows from "
            f"{maker_of(min(labels))!r}, which is not followed; compute a new tensor"
        )


def maker_of(label: str) -> str:
    """Return the submodule, parameter or draw that makes a leaf."""
    return label.partition("#")[0]
