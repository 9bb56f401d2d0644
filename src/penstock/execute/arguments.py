"""Looks at what `Pipeline` was given before anything is made of it, and says what was expected instead."""

import inspect
from collections.abc import Callable
from operator import index
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError, described
from penstock.execute.accelerator import require_available
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

PROCESS_GROUP = "process_group"


def layer_list(layers: Any) -> list[Any]:
    """Return the layers of a model: modules, or what builds one when it is called without arguments.

    Raises:
        ConfigError: they are no list of these.
    """
    if isinstance(layers, str | dict | nn.ModuleDict) or not _is_list(layers):
        raise ConfigError(
            f"{_kind(layers)}; {_way_to_layers(layers)}give an nn.Sequential or a list of layers, in order: modules, "
            "or callables that build one",
            key="layers",
        )
    items = list(layers)
    for number, layer in enumerate(items):
        problem = _why_no_layer(layer)
        if problem:
            raise ConfigError(
                f"layer {number} is {problem}. Give a module, or a callable that builds one when it is called without "
                "arguments; a function that computes goes into the forward of a module",
                key="layers",
            )
    return items


def require_slices(schedule: Schedule | Program, num_slices: int | None) -> None:
    """Refuse a number of slices that is not the schedule's. Raises: ConfigError."""
    if num_slices not in (None, schedule.num_slices):
        raise ConfigError(
            f"{num_slices}, but {schedule.name} is for {schedule.num_slices} slices; make them equal", key="slices"
        )


def require_schedule(schedule: Any) -> None:
    """Make sure that a schedule is a name, a `Schedule`, a `Program` or the path of a file. Raises: ConfigError."""
    is_right = isinstance(schedule, str | Path | Schedule | Program)
    advice = ". penstock.build(function, ranks=..., microbatches=...) makes a schedule of a function"
    expected = f"a name, a Schedule, a Program, or the path of a file{advice if callable(schedule) else ''}"
    require("schedule", schedule, is_right, expected)


def require_split(split: Any) -> None:
    """Make sure that a split is a list of whole numbers. Raises: ConfigError."""
    if split is None:
        return
    if isinstance(split, str) or not _is_list(split):
        raise ConfigError(f"{described(split)}; give a list, the number of layers per stage: split=[2, 3]", key="split")
    for number in split:
        try:
            index(number)
        except TypeError:
            raise ConfigError(f"{described(number)} is no number of layers; give whole numbers", key="split") from None


def require_loss(loss: Any) -> None:
    """Make sure that a loss is a function of output and target, or None.

    Raises:
        ConfigError: it is something else, such as the class of a loss.
    """
    if isinstance(loss, type):
        raise ConfigError(f"the class {loss.__name__} is given; give one of it, loss={loss.__name__}()", key="loss")
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"{described(loss)}; give a function of the output and the target, such as torch.nn.MSELoss()", key="loss"
        )


def require(key: str, value: Any, is_right: bool, expected: str) -> None:
    """Make sure that an option is what it is expected to be. Raises: ConfigError."""
    if not is_right:
        raise ConfigError(f"{described(value)}; expected {expected}", key=key)


def require_device(device: Any) -> None:
    """Make sure that a device is one that torch knows and that this process has, or None.

    Raises:
        ConfigError: it is not; with what torch says of it.
    """
    try:
        torch_device = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{described(device)} is no device of torch: {reason}", key="device") from error
    require_available(torch_device, "device")


def describe_function(function: Any) -> str:
    """Say whether a function is given, in a text that is the same on ranks that were given one function."""
    return "none" if function is None else "a function"


def is_whole_number(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


LONGEST_TIME_S = 1_000_000
"""The longest time in seconds: the system counts milliseconds in 32 bits."""
TIME_RULE = f"a number of seconds larger than 0, at most {LONGEST_TIME_S:,}"


def is_time(value: Any) -> bool:
    """Whether a value is a number of seconds that something can wait."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= LONGEST_TIME_S


def require_process_group(process_group: Any) -> None:
    """Make sure that it is a process group, or None. Raises: ConfigError."""
    if process_group is not None and not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        text = f"{described(process_group)}; expected a process group of torch.distributed"
        raise ConfigError(text, key=PROCESS_GROUP)


def names_of_children(layers: Any) -> list[str]:
    """Return the names that a container of torch gives its layers, in order; none for other lists.

    A module that is there twice has both its names.
    """
    if not isinstance(layers, nn.Sequential | nn.ModuleList):
        return []
    return [name for name, _ in layers.named_modules(remove_duplicate=False) if name and "." not in name]


def _way_to_layers(value: Any) -> str:
    """Say what makes layers of a whole model, with its own names; nothing where it has no blocks to cut it at."""
    if not isinstance(value, nn.Module):
        return ""
    # By its name, since transformers may not be installed.
    is_of_transformers = any(base.__name__ == "PreTrainedModel" for base in type(value).__mro__)
    blocks = _blocks_of(value)
    calls = [
        *(["ps.from_transformers(model), if it is a causal language model"] if is_of_transformers else []),
        *([f"ps.cut(model, [{f'{blocks}.*'!r}]), which cuts it at its {_size_of(value, blocks)}"] if blocks else []),
    ]
    return f"pass {', or '.join(calls)}; or " if calls else ""


def _blocks_of(model: nn.Module) -> str:
    """Return the name of the longest list of modules of one class in a model; of equally long ones, the outermost."""
    lengths = {
        name: len(module)
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        if len({type(block) for block in module}) == 1 and any(True for _ in module.parameters())
    }
    return max(lengths, key=lambda name: lengths[name], default="")


def _size_of(model: nn.Module, blocks: str) -> str:
    names = [f"{blocks}.{name}" for name, _ in model.get_submodule(blocks).named_children()]
    return f"{len(names)} blocks, {names[0]} to {names[-1]}"


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__iter__")


def _why_no_layer(layer: Any) -> str:
    if isinstance(layer, nn.Module):
        return ""
    if not callable(layer):
        return described(layer)
    missing = _missing_arguments(layer)
    return f"{_kind(layer)}, which cannot be called without {missing}" if missing else ""


def _missing_arguments(build: Callable[..., Any]) -> str:
    """Name the arguments that a callable cannot be called without; nothing where it does not say."""
    if inspect.isbuiltin(build):  # those of torch say nothing, and none builds a module
        return "arguments"
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return ""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [param.name for param in parameters if param.default is param.empty and param.kind not in variadic]
    return ", ".join(missing)


def _kind(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"one module, a {type(value).__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    return described(value)
