"""The backends of torch.compile whose backwards can be run in two parts: "penstock", and "aot_eager" as it is in torch.

Inductor makes kernels, "aot_eager" runs the traced operations one by one. Both compile forwards, and backwards that are
run whole, exactly as torch's backends of these names.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from penstock.errors import ConfigError, nearest, warn
from penstock.execute.split.compiled_block import BlockBackward
from penstock.execute.undocumented_compiler import (
    compile_aot_eager,
    compile_inductor,
    compile_kernels,
    obstacle_to_inductor,
    options_of_mode,
    traced_code,
)

Backend = Callable[..., Any]


def find_backend(name: bool | str) -> Backend | str:
    """Return the backend that `compile=` names, for torch.compile; True is "penstock".

    Raises:
        ConfigError: neither Penstock nor torch knows the name.
    """
    if name in _BACKENDS:
        return _BACKENDS[name]
    if name not in torch.compiler.list_backends(None):  # None: with the backends for debugging
        names = sorted({*torch.compiler.list_backends(), "aot_eager", "inductor", "penstock"})
        raise ConfigError(
            f"torch.compile has no backend {name!r}.{nearest(str(name), names)} Expected true, false or one of "
            f"{', '.join(names)}",
            key="compile",
        )
    return str(name)


def penstock(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unused: Any,
) -> Any:
    """Compile a graph by Inductor where nothing keeps it from that, else as "aot_eager" does."""
    devices = sorted({value.device.type for value in inputs if isinstance(value, Tensor)})
    if not all(map(_has_inductor, devices)):
        return aot_eager(graph, inputs)
    settings = {**(options_of_mode(mode) if mode else {}), **(options or {})}
    return compile_inductor(graph, inputs, _splitting(partial(compile_kernels, options=settings)), settings)


def aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], **unused: Any) -> Any:
    """Compile a graph as "aot_eager" does."""
    compile_one = _splitting(traced_code)
    return compile_aot_eager(graph, inputs, compile_one, partial(compile_one, is_backward=True))


_BACKENDS: Mapping[bool | str, Backend] = {
    True: penstock,
    "penstock": penstock,
    "inductor": penstock,
    "aot_eager": aot_eager,
}


def _splitting(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles a graph's forward, then its backward so that it can be run in two parts."""
    is_tensor: list[bool] = []

    def compile_one(module: fx.GraphModule, examples: Sequence[Any], **arguments: Any) -> Any:
        compile_whole = partial(compile_graph, **arguments)
        if arguments.get("is_backward"):
            # `static_input_idxs` are places in the whole graph, so they would mean other inputs in a half.
            compile_half = partial(compile_graph, **arguments | {"static_input_idxs": ()})
            return BlockBackward(module, examples, is_tensor, compile_whole, compile_half).function()
        is_tensor[:] = [isinstance(value, Tensor) for value in examples]
        return compile_whole(module, examples)

    return compile_one


@cache
def _has_inductor(device: str) -> bool:
    """Whether Inductor can compile for a type of device; says so once where it cannot."""
    obstacle = obstacle_to_inductor(device)
    if obstacle:
        warn(f"compiled layers run as aot_eager, one operation after another: {obstacle}")
    return not obstacle
