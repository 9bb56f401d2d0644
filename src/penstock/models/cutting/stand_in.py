"""`StandIn`: takes the place of a submodule in a frame, and asks the run that is under way what it returns."""

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.placeholders import DELETED, Placeholder
from penstock.models.cutting.undocumented import forward_hooks, has_further_hooks, own_tensors_of, remove_forward_hooks

CALL, FORWARD = "__call__", "forward"
CHANGES_OWN = (
    "{!r} changes its attribute {!r}, which the forward around the points reads; other stages would read another "
    "value. Return it, hand it on by a ps.Skip, or add it to a ps.AuxiliaryLoss"
)


class Run(Protocol):
    """One run of a frame's forward, which decides what its stand-ins return."""

    def call_method(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder
    ) -> Any:
        """Return what the forward gets from its call of a method of the submodule `name`."""

    def local_module(self, name: str) -> nn.Module | None:
        """Return the submodule itself where the part that runs has it; None elsewhere."""

    def tensor_attribute(self, label: str, tensor: Tensor) -> Tensor:
        """Return the value of a tensor that a submodule of another part holds, as far as it is there."""

    def note_read(self, name: str, attribute: str) -> None:
        """Note that the forward reads an attribute of the submodule `name` that is no tensor."""

    def write(self, name: str, attribute: str, value: Any, placeholder: Placeholder) -> None:
        """Set an attribute of the submodule `name`, or delete it where the value is `DELETED`."""


class Host(Protocol):
    """The frame in which stand-ins are."""

    run: Run | None
    """The run that is under way; None between runs."""
    written: list[Any]
    """The stand-ins on which the run has set attributes."""
    refusal: PenstockError | None
    """The first error by which a stand-in has refused what the forward does."""

    def mode_of(self, owner: nn.Module) -> bool:
        """Return whether a submodule of another part is in training mode."""


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note a refusal, which a forward with `except Exception` would take for an error of its own."""

    @wraps(method)
    def noted_method(self: "StandIn", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except PenstockError as error:
            host = self._target[2]
            host.refusal = host.refusal or error
            raise

    return noted_method


class StandInType(type):
    """The type of stand-ins for modules of one class: its name and comparisons are those of this class."""

    owner_type: type

    def __eq__(cls, other: object) -> bool:
        """Whether the other one is this type, or the class of the module, as in `type(block) == Block`."""
        return other is cls or other is cls.owner_type

    def __hash__(cls) -> int:
        """Return the hash of the class of the module, for dicts by class."""
        return hash(cls.owner_type)


def stand_in_for(name: str, placeholder: Placeholder, host: Host) -> "StandIn":
    """Return a stand-in for a submodule, of the type for its class."""
    owner_type: Any = type(placeholder.owner)
    stand_in: StandIn = _type_for(owner_type)(name, placeholder, host)
    return stand_in


@cache
def _type_for(owner_type: Any) -> Any:
    return StandInType(owner_type.__name__, (StandIn,), {"owner_type": owner_type, "__module__": owner_type.__module__})


class StandIn(nn.Module):
    """Takes the place of a submodule; has its class, its submodules and its attributes."""

    def __init__(self, name: str, placeholder: Placeholder, host: Host) -> None:
        # Past nn.Module's __setattr__, which would register a module as a submodule.
        object.__setattr__(self, "_target", (name, placeholder, host))
        object.__setattr__(self, "_written", {})
        object.__setattr__(self, "_nested", {})
        super().__init__()
        # A model may ask its parameters for their device and dtype.
        parameters, buffers = own_tensors_of(self)
        parameters.update(placeholder.module.named_parameters(recurse=False))
        buffers.update(placeholder.module.named_buffers(recurse=False))

    def forget_written(self) -> None:
        """Forget what a run of the forward has set."""
        for name in self._written:
            self.__dict__.pop(name, None)
        self._written.clear()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the module, for a forward that asks isinstance()."""
        return type(self._target[1].owner)

    @property
    def training(self) -> bool:
        """The mode of the submodule."""
        name, placeholder, host = self._target
        if "training" in self._written:
            return bool(self._written["training"])
        local_module = None if host.run is None else host.run.local_module(name)
        return bool(host.mode_of(placeholder.owner) if local_module is None else local_module.training)

    @training.setter
    def training(self, is_training: bool) -> None:
        """Ignore the mode that nn.Module's constructor sets; a forward sets it as any attribute."""

    @property
    def _modules(self) -> dict[str, Any]:
        """Stand-ins of the submodules, made where a forward looks at them."""
        name, placeholder, host = self._target
        owners = dict(placeholder.owner.named_children())
        for child_name, module in placeholder.module.named_children():
            if child_name not in self._nested:
                full_name = f"{name}.{child_name}"
                placeholder_of_child = Placeholder(full_name, owners[child_name], module)
                self._nested[child_name] = stand_in_for(full_name, placeholder_of_child, host)
        nested: dict[str, Any] = self._nested
        return nested

    @_modules.setter
    def _modules(self, modules: dict[str, Any]) -> None:
        """Ignore the dict that nn.Module's constructor makes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the run for what a call returns, hooks included; then run the hooks that the stand-in has itself."""
        if has_further_hooks(self):
            raise PenstockError(
                f"the forward puts a hook on {self._target[0]!r} that runs before its forward, or in its backward, "
                "which a stage without this submodule cannot run; register it on the submodule before the cut"
            )
        output = self._call_method(CALL, *args, **kwargs)
        hooks = forward_hooks(self)
        if not hooks:
            return output
        name, _, host = self._target
        local_module = None if host.run is None else host.run.local_module(name)
        run_hooks = [] if local_module is None else forward_hooks(local_module)
        for hook, takes_keywords in hooks:
            if (hook, takes_keywords) not in run_hooks:
                result = hook(self, args, kwargs, output) if takes_keywords else hook(self, args, output)
                output = output if result is None else result
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the run for what the module's forward alone returns."""
        return self._call_method(FORWARD, *args, **kwargs)

    @_noted
    def __getattr__(self, name: str) -> Any:
        module_name, placeholder, host = self._target
        if name in self._written:  # and is not there: its owner has it, but the forward has deleted it
            raise AttributeError(f"{name!r} was deleted")
        if name in self._modules:
            return self._nested[name]
        run: Run | None = host.run
        local_module = None if run is None else run.local_module(module_name)
        if local_module is not None and run is not None:
            value = getattr(local_module, name)
            if not isinstance(value, Tensor | nn.Module) and getattr(value, "__self__", None) is not local_module:
                run.note_read(module_name, name)
            return value
        if not hasattr(placeholder.owner, name) and hasattr(placeholder.module, name):
            raise PenstockError(CHANGES_OWN.format(module_name, name))
        value = getattr(placeholder.owner, name)
        if run is None or isinstance(value, Tensor):
            return _tensor_attribute(f"{module_name}.{name}", value, placeholder, run)
        if getattr(value, "__self__", None) is placeholder.owner:
            return partial(self._call_method, name)
        run.note_read(module_name, name)
        return value

    @_noted
    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as the forward does; it is read again until the run ends."""
        module_name, placeholder, host = self._target
        if host.run is None:
            raise PenstockError(f"an attribute {name!r} is set on the stand-in of {module_name!r} outside of a forward")
        host.run.write(module_name, name, value, placeholder)
        if not self._written:
            host.written.append(self)
        self._written[name] = value
        if value is DELETED:
            self.__dict__.pop(name, None)
        else:
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        setattr(self, name, DELETED)

    @_noted
    def _call_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        name, placeholder, host = self._target
        if host.run is None:
            raise PenstockError(
                f"the stand-in of {name!r} is called outside of a forward; call the layers of the pipeline"
            )
        return host.run.call_method(name, method, args, kwargs, placeholder)


def share_hooks(root: Any, is_shared: Callable[[Any], bool]) -> None:
    """Let the stand-ins of a frame run some forward hooks of the submodules whose places they take.

    Such hooks collect outputs for the forward around the submodules. They see the outputs of stand-ins, not those of
    the copies without values by which these are found.
    """
    if not issubclass(type(root), StandIn):
        for child in root.children():
            share_hooks(child, is_shared)
        return
    _, placeholder, _ = root._target
    for module in placeholder.module.modules():
        remove_forward_hooks(module, is_shared)
    for hook, takes_keywords in forward_hooks(placeholder.owner):
        if is_shared(hook):
            root.register_forward_hook(hook, with_kwargs=takes_keywords)


def _tensor_attribute(full_name: str, value: Any, placeholder: Placeholder, run: Run | None) -> Any:
    """Return a tensor of a submodule as a leaf; one that is no parameter or buffer may change with each call."""
    module_name, _, name = full_name.rpartition(".")
    parameters, buffers = own_tensors_of(placeholder.module)
    bare = parameters.get(name, buffers.get(name))
    if run is None:
        return value if bare is None else bare
    if bare is None:
        raise PenstockError(
            f"the forward reads the tensor {name!r} of {module_name!r}, which is neither a parameter nor a buffer, so "
            "that no other stage has it; let the submodule return it, or register it as a buffer"
        )
    return run.tensor_attribute(full_name, bare)


def bare_parameter(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device in the place of a parameter or buffer of another part."""
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
