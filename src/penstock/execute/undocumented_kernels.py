"""A context in which a function sees the tensors that kernels take and make: torch documents no such hook."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

_KernelMode: Any = attrgetter("utils._python_dispatch.TorchDispatchMode")(torch)


class SeenKernels(_KernelMode):  # type: ignore[misc]
    """Calls a function behind each kernel of this thread, with all that the kernel took and what it returned.

    In a backward, these are the kernels that autograd runs. Code that torch.compile has made calls its kernels itself,
    and is seen by nobody.
    """

    supports_higher_order_operators = True  # such as flex_attention, which is refused under other modes

    def __init__(self, note: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self._note = note

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile that it may run under this mode; else layers would run uncompiled meanwhile."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **kwargs or {})
        self._note((args, kwargs), results)
        return results
