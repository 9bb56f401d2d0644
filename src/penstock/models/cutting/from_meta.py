"""A module on the meta device, cut into layers that read their own tensors when they are built.

    module on meta  ──► points, as of any module  ──► one `CutSpec` for each layer
    CutSpec()       ──► a copy of its submodules, with the tensors of these names

Buffers that no file has, such as tables of positions, are made by the `reset_parameters` of their module.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.cutting.cut import ByName, CutSpec, multiplications, segments, tensors_of_segment
from penstock.models.cutting.forward import CutForward, Segment
from penstock.models.cutting.frame import Template
from penstock.models.cutting.part import CutPart, part_class
from penstock.models.cutting.points import cut_model, own_tensors, saved_tensors, set_tensor, tensor_of

Read = Callable[[str], Tensor]
"""Returns the value of a parameter or saved buffer, by the name that the whole model gives it."""
RESET = "reset_parameters"
"""The method by which modules of torch make their tensors anew."""


def cut_from_meta(model: nn.Module, points: Sequence[str], read: Read) -> list[CutSpec]:
    """Return the layers of a module on the meta device, cut at the submodules that `points` name; nothing is read yet.

    `read(name)` returns a parameter or saved buffer from files; a layer reads its own when it is built.

    Raises:
        ConfigError: as of `cut`; or no file has a buffer, and its module does not make it anew; or a module has a
            tensor on the meta device that is neither a parameter nor a buffer.
    """
    for path, module in model.named_modules():
        _refuse_plain_tensors(path, module)
        _unsaved_buffers(path, module, torch.device("cpu"))  # refuses here what a rank would refuse when it builds
    # All layers share one template: the module without values, but with the buffers that its forward reads.
    cut = cut_model(model, points)
    buffer_names = [name for name in cut.tensors if not isinstance(tensor_of(model, name), nn.Parameter)]

    def complete(frame: nn.Module, device: torch.device) -> None:
        for name in buffer_names:
            set_tensor(frame, name, _with_values(tensor_of(frame, name), read(name), device))
        _make_unsaved_buffers(frame, device)

    entry = ByName(model)
    forward = CutForward(Template(model, cut, complete), entry)
    part_type = part_class(entry.batch_signature)
    owners: dict[int, str] = {}
    specs = []
    for name, segment in segments(cut).items():
        make_part = partial(part_type, forward, name, segment)
        part = make_part(*tensors_of_segment(model, segment))
        parameters = list(part.named_parameters(remove_duplicate=False))
        specs.append(
            CutSpec(
                name,
                partial(_build, make_part, model, segment, read),
                weight=multiplications(part),
                tied=tuple((alias, owners[id(item)]) for alias, item in parameters if id(item) in owners),
                has_full_names=True,
                batch_signature=entry.batch_signature,
            )
        )
        # A parameter that layers share belongs to the first layer that has it.
        owners = {id(item): full_name for full_name, item in reversed(parameters)} | owners
    return specs


def _build(make: Callable[..., CutPart], model: nn.Module, segment: Segment, read: Read) -> CutPart:
    """Build one layer on the default device."""
    device = torch.get_default_device()
    modules, tensors = tensors_of_segment(model, segment)
    values: dict[int, Any] = {}
    if device.type != "meta":
        # Also those on another device than meta, as a buffer of torch.from_numpy is: the files have them all.
        for name, tensor in saved_tensors(make(modules, tensors)).items():
            if id(tensor) not in values:
                values[id(tensor)] = _with_values(tensor, read(name), device)
    # One memo for all of the layer, so that modules which share a tensor go on to share it.
    part = make(*copy.deepcopy((modules, tensors), values))
    if device.type != "meta":
        _make_unsaved_buffers(part, device)
    return part


def _with_values(like: Tensor, values: Tensor, device: torch.device) -> Tensor:
    """Return values as a parameter or buffer of the type of one on the meta device."""
    values = values.to(device, like.dtype)
    return nn.Parameter(values, like.requires_grad) if isinstance(like, nn.Parameter) else values


def _refuse_plain_tensors(path: str, module: nn.Module) -> None:
    """Refuse tensors on the meta device that are neither parameters nor buffers. Raises: ConfigError."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ConfigError(
                f"the tensor {f'{path}.{name}'.lstrip('.')!r} is on the meta device, and no file has it, since it is "
                "neither a parameter nor a buffer. Make it with device='cpu', or register it as a buffer that is not "
                f"saved (persistent=False) and that a {RESET}() of {type(module).__name__} fills",
                key="model",
            )


def _make_unsaved_buffers(root: nn.Module, device: torch.device) -> None:
    for path, module in root.named_modules():
        for name, buffer in _unsaved_buffers(path, module, device).items():
            setattr(module, name, buffer)


def _unsaved_buffers(path: str, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the buffers of a module that are on the meta device and in no file, made anew by the module itself.

    Made twice, from memory of other contents: what differs then was not made at all. Raises: ConfigError.
    """
    meta_names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
    saved_names = {name for name, _ in own_tensors(module)}
    names = [name for name in meta_names if name not in saved_names]
    if not names:
        return {}
    after_zeros, after_ones = (_reset(module, device, fill) for fill in (0, 1))
    unmade_names = [name for name in names if not torch.equal(after_zeros[name], after_ones[name])]
    if unmade_names:
        full_name = f"{path}.{unmade_names[0]}" if path else unmade_names[0]
        raise ConfigError(
            f"the buffer {full_name!r} is on the meta device, and no file has it (persistent=False). Give "
            f"{type(module).__name__} a {RESET}() that fills it, or make it with device='cpu'",
            key="model",
        )
    # A reset makes them in torch's default type, whatever type the model was given since.
    return {name: after_zeros[name].to(device, getattr(module, name).dtype) for name in names}


def _reset(module: nn.Module, device: torch.device, fill: int) -> dict[str, Tensor]:
    """Return the buffers of a copy of a module after its reset, which finds this number everywhere."""
    trial = copy.deepcopy(module).to_empty(device=device, recurse=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), device:
        for buffer in trial.buffers(recurse=False):
            buffer.fill_(fill)
        if hasattr(trial, RESET):
            getattr(trial, RESET)()
    return dict(trial.named_buffers(recurse=False))
