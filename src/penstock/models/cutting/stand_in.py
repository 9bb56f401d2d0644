"""`StandIn`: takes the place of a submodule in a frame, and asks the run that is under way what it returns."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.placeholders import Placeholder
from penstock.models.cutting.undocumented import own_tensors_of

CALL, FORWARD = "__call__", "forward"


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

    def note_write(self, name: str, attribute: str, value: Any) -> None:
        """Note that the forward sets or deletes an attribute of the submodule `name`."""


class StandIn(nn.Module):
    """Takes the place of a submodule; has its class and its attributes."""

    def __init__(self, name: str, placeholder: Placeholder, current_run: Callable[[], Run | None]) -> None:
        super().__init__()
        # Past nn.Module's __setattr__, which would register a module as a submodule.
        object.__setattr__(self, "_target", (name, placeholder, current_run))
        object.__setattr__(self, "_written", {})
        # A model may ask its parameters for their device and dtype.
        own_tensors_of(self)[0].update(placeholder.module.named_parameters())

    def begin_run(self, *, is_training: bool) -> None:
        """Forget what an earlier run has set; `is_training` is the mode of the submodule."""
        self.__dict__["training"] = is_training
        self.__dict__["_written"].clear()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the module, for a forward that asks isinstance()."""
        return type(self._target[1].owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the run for what a call returns, hooks included."""
        return self._call_method(CALL, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the run for what the module's forward alone returns."""
        return self._call_method(FORWARD, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module_name, placeholder, current_run = self._target
        if name in self._written:
            return self._written[name]
        run: Run | None = current_run()
        local_module = None if run is None else run.local_module(module_name)
        if local_module is not None and run is not None:
            value = getattr(local_module, name)
            if not isinstance(value, Tensor | nn.Module):
                run.note_read(module_name, name)
            return value
        shape_value = getattr(placeholder.module, name, None)
        value = getattr(placeholder.owner, name) if shape_value is None else shape_value
        if isinstance(value, nn.Module):
            owner = getattr(placeholder.owner, name)
            return StandIn(f"{module_name}.{name}", Placeholder(owner, value), current_run)
        if run is None:
            return value
        if isinstance(value, Tensor):
            return run.tensor_attribute(f"{module_name}.{name}", value)
        if getattr(value, "__self__", None) is placeholder.module:
            return partial(self._call_method, name)
        run.note_read(module_name, name)
        return getattr(placeholder.owner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._write(name, value)
        self._written[name] = value
        self.__dict__.pop(name, None)

    def __delattr__(self, name: str) -> None:
        self._write(name, None)
        self._written.pop(name, None)

    def _write(self, name: str, value: Any) -> None:
        module_name, _, current_run = self._target
        run = current_run()
        if run is None:
            raise PenstockError(f"an attribute {name!r} is set on the stand-in of {module_name!r} outside of a forward")
        run.note_write(module_name, name, value)
        local_module = run.local_module(module_name)
        if local_module is not None and name in self._written and value is None:
            delattr(local_module, name)
        elif local_module is not None:
            setattr(local_module, name, value)

    def _call_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        name, placeholder, current_run = self._target
        run = current_run()
        if run is None:
            raise PenstockError(
                f"the stand-in of {name!r} is called outside of a forward; call the layers of the pipeline"
            )
        return run.call_method(name, method, args, kwargs, placeholder)


def bare_parameter(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device in the place of a parameter or buffer of another part."""
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
