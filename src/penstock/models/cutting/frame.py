"""A module without its parts: its forward runs between two of them, with stand-ins for all that others have.

    Model.forward    embedding      blocks.0       blocks.1       norm       head
    part `blocks.1`  stand-in ...   stand-in ...   the block  ──► stop: what norm would get is the part's output

The forward is the module's own, so masks, positions and whatever else a part is given are made as the module makes
them. What stand-ins return is on the meta device, and followed by labels (labels.py).
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.labels import Labels
from penstock.models.cutting.placeholders import Placeholder
from penstock.models.cutting.points import CutModel, tensor_of
from penstock.models.cutting.stand_in import Run, bare_parameter, stand_in_for
from penstock.models.cutting.state import changed_names, fingerprint, module_state
from penstock.models.cutting.trees import tensors_in
from penstock.models.cutting.undocumented import (
    forward_hooks,
    hooks_around_forward,
    own_tensors_of,
    plain_attributes_of,
    remove_hooks_besides,
)
from penstock.models.skip import Skip


class Template:
    """The module that frames are made from, and what its parts return."""

    def __init__(
        self, model: nn.Module, cut: CutModel, complete: Callable[[nn.Module, torch.device], None] | None = None
    ) -> None:
        """`model` stays as it is; frames follow what its owner changes around the points of the `cut`.

        `complete` gives values to the tensors of a frame that are on the meta device, if the model is there.
        """
        self.model, self.cut, self.name = model, cut, type(model).__name__
        self.positions = {name: position for position, name in enumerate(cut.points)}
        self.complete = complete or (lambda model, device: None)
        # Submodules that stand-ins replace; of those before the points, the ones with parameters come first.
        trained = [name for name in cut.begin_modules if any(True for _ in model.get_submodule(name).parameters())]
        names = [*trained, *(name for name in cut.begin_modules if name not in trained), *cut.points]
        self.modules = {name: model.get_submodule(name) for name in names}
        self._hidden = frozenset(map(id, self.modules.values()))
        self.placeholders = {
            name: Placeholder(name, module, is_point=name in self.positions) for name, module in self.modules.items()
        }
        self.saved_names = frozenset(cut.tensors)
        self.parameters = {id(item): (weakref.ref(item), name) for name, item in model.named_parameters()}
        """A weak reference and the name of each parameter of the model, by id."""
        self.bare_parameters = {
            id(parameter): bare
            for name, module in self.modules.items()
            for parameter, bare in zip(module.parameters(), self.placeholders[name].module.parameters(), strict=True)
        }
        """Parameters without values in the places of those of submodules, by the ids of these."""
        self._held = self._current_items()
        modules = [module for placeholder in self.placeholders.values() for module in placeholder.module.modules()]
        self.skips = [module for module in modules if isinstance(module, Skip)]

    def require_held_items(self) -> None:
        """Refuse a model whose owner has replaced what its parts hold. Raises: PenstockError."""
        for name, item in self._current_items().items():
            held_item = self._held[name]
            if isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and _have_equal_values(item, held_item):
                self._held[name] = item  # a buffer that moved to a device, as model.to() makes a new one
            elif item is not held_item:
                raise PenstockError(
                    f"{name!r} of {self.name} was {'removed' if item is None else 'replaced'} after the cut, and its "
                    "layers go on with the earlier one; cut the model again, or change it in place, as "
                    "load_state_dict() does without assign=True"
                )

    def _current_items(self) -> dict[str, nn.Module | Tensor | None]:
        """Return the submodules and tensors that parts hold, as the model has them now; None for one that is gone."""
        return {name: _item_of(self.model, name) for name in (*self.modules, *self.cut.tensors)}

    def state(self) -> dict[str, Any]:
        """Return the fingerprints of what the owner may change around the points."""
        return module_state(self.modules_around(), self.saved_names, self._hidden)

    def tensors_around(self) -> dict[str, Tensor]:
        """Return the tensors that frames copy, by name: buffers and attributes that no part holds."""
        tensors: dict[str, Tensor] = {}
        for path, module in self.modules_around():
            for name, value in (plain_attributes_of(module) | own_tensors_of(module)[1]).items():
                full_name = f"{path}.{name}" if path else name
                if full_name not in self.saved_names:
                    found = (tensor for tensor in tensors_in(value) if not tensor.is_meta)
                    tensors |= {f"{full_name} {index}": tensor for index, tensor in enumerate(found)}
        return tensors

    def code_around(self) -> tuple[list[nn.Module], list[Any]]:
        """Return the modules around the points, and their hooks."""
        modules = [module for _, module in self.modules_around()]
        return modules, [hook for module in modules for hook in hooks_around_forward(module)]

    def modules_around(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the owner's modules around the points, by name."""
        return _around(self.model, self._hidden)


class Frame:
    """One thread's copy, on one device, of the modules around the points of a model."""

    def __init__(self, template: Template, device: torch.device) -> None:
        """Copy the model onto `device`, with a stand-in in the place of each submodule that parts run."""
        self.template, self.device = template, device
        self.run: Run | None = None
        """The run that is under way; None between runs."""
        self.written: list[Any] = []
        """The stand-ins on which the run has set attributes."""
        self.refusal: PenstockError | None = None
        """The first error by which a stand-in has refused what the forward of this run does."""
        self._is_training = False
        self.stand_ins = {
            name: stand_in_for(name, placeholder, self) for name, placeholder in template.placeholders.items()
        }
        # deepcopy takes what `memo` has for an object in place of a copy.
        memo: dict[int, Any] = {id(module): self.stand_ins[name] for name, module in template.modules.items()}
        memo |= template.bare_parameters  # as in a list of parameters that the model keeps
        memo |= {id(tensor): bare_parameter(tensor) for tensor in self._saved_tensors(template.model).values()}
        for _, module in template.modules_around():
            memo |= {id(value): value.detach().clone() for value in vars(module).values() if _has_graph(value)}
        self.model: nn.Module = copy.deepcopy(template.model, memo)
        template.complete(self.model, device)
        self._hidden = frozenset(map(id, self.stand_ins.values()))
        self._modules = list(_around(self.model, self._hidden))
        self._owners = dict(template.modules_around())
        for _, module in self._modules:
            _move_buffers(module, device)
        self._last_state = self._state()
        self._kept_hooks = {name: forward_hooks(stand_in) for name, stand_in in self.stand_ins.items()}

    def changed_names(self) -> list[str]:
        """Return the full names of what forwards have changed around the points since the last question."""
        earlier_state, self._last_state = self._last_state, self._state()
        return changed_names(earlier_state, self._last_state)

    def _state(self) -> dict[str, Any]:
        return module_state(self._modules, self.template.saved_names, self._hidden)

    @contextmanager
    def running(
        self, run: Run, labels: Labels, tensors: Mapping[str, Tensor], *, is_training: bool
    ) -> Iterator[nn.Module]:
        """Let the model's forward run inside; `tensors` take the places of parameters and buffers around the points.

        Raises:
            PenstockError: a stand-in or an operator has refused something, and the forward has caught that error.
        """
        self._is_training, self.refusal = is_training, None
        for stand_in in self.written:
            stand_in.forget_written()
        self.written.clear()
        for name, stand_in in self.stand_ins.items():  # a run that was stopped has not removed its hooks
            remove_hooks_besides(stand_in, self._kept_hooks[name])
        for path, module in self._modules:
            module.training = self.mode_of(self._owners.get(path, self.template.model))
        for name in self.template.saved_names:
            self._put(name, tensors.get(name))
        skip_values = _SkipValues()
        for skip in self.template.skips:
            skip.begin_skips(skip_values)
        self.run = run
        try:
            with labels:
                yield self.model
        finally:
            self.run = None  # it holds what arrived
            for skip in self.template.skips:
                skip.end_skips()
        refusal = labels.refusal or self.refusal
        if refusal is not None:
            raise refusal

    def buffer_state(self) -> dict[str, Any]:
        """Return the fingerprints of the saved buffers around the points."""
        template = self.template
        buffers = [
            name for name in template.cut.tensors if not isinstance(tensor_of(template.model, name), nn.Parameter)
        ]
        return {name: fingerprint(tensor_of(self.model, name)) for name in buffers}

    def value(self, name: str) -> Any:
        """Return an attribute around the points by its full name; None where it is not there."""
        path, _, attribute = name.rpartition(".")
        return getattr(self.model.get_submodule(path), attribute, None)

    def source_value(self, name: str) -> Any:
        """Return an attribute of the owner's module by its full name; None where it is not there."""
        path, _, attribute = name.rpartition(".")
        return getattr(self.template.model.get_submodule(path), attribute, None)

    def put_values(self, values: Mapping[str, Any]) -> None:
        """Set attributes around the points by their full names."""
        for name, value in values.items():
            path, _, attribute = name.rpartition(".")
            module = self.model.get_submodule(path)
            buffers = own_tensors_of(module)[1]
            (buffers if attribute in buffers else vars(module))[attribute] = value

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and saved buffers around the points, as the forward has left them."""
        return self._saved_tensors(self.model)

    def _saved_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor_of(model, name) for name in self.template.cut.tensors}

    def _put(self, name: str, tensor: Tensor | None) -> None:
        path, _, tensor_name = name.rpartition(".")
        parameters, buffers = own_tensors_of(self.model.get_submodule(path))
        like = tensor_of(self.template.model, name)
        values: dict[str, Any] = parameters if isinstance(like, nn.Parameter) else buffers
        values[tensor_name] = bare_parameter(like) if tensor is None else tensor

    def mode_of(self, owner: nn.Module) -> bool:
        """Return whether a module is in training mode: as the part, unless its owner has put it into evaluation."""
        return self._is_training and (owner.training or not self.template.model.training)


class _SkipValues:
    """What stand-ins hand on by a `ps.Skip` in one run, without values."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value

    def get(self, name: str) -> Any:
        return self._values[name]


def _item_of(model: nn.Module, name: str) -> Any:
    """Return a submodule or tensor by its full name; None where it is not there."""
    path, _, attribute = name.rpartition(".")
    try:
        return getattr(model.get_submodule(path), attribute, None)
    except AttributeError:
        return None


def _around(model: nn.Module, hidden: frozenset[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, each once, by name, without the hidden ones and what these hold."""
    known = set(hidden)

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        known.add(id(module))
        yield path, module
        for name, child in module.named_children():
            if id(child) not in known:
                yield from walk(f"{path}.{name}" if path else name, child)

    return walk("", model)


def _have_equal_values(buffer: Tensor, other: Any) -> bool:
    is_alike = isinstance(other, Tensor) and (buffer.shape, buffer.dtype) == (other.shape, other.dtype)
    return buffer is other or (is_alike and not buffer.is_meta and torch.equal(buffer.cpu(), other.cpu()))


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _has_values(buffer: Tensor | None) -> bool:
    return buffer is not None and not buffer.is_meta


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, not those of its submodules."""
    buffers = own_tensors_of(module)[1]
    buffers.update({name: buffer.to(device) for name, buffer in buffers.items() if _has_values(buffer)})
