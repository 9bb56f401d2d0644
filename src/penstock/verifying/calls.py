"""The results of all modules in the order of their calls, by which the first wrong one is found.

The n-th call on a rank need not be the n-th of the unsplit model: a stage may call what makes masks once for itself. So
a result is right if some call of the same module in the unsplit model returned the same.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.execute.values.tree import tensors_of
from penstock.verifying.comparing import error_between, largest_of


class CallLog:
    """Copies of what modules return, by their names, in the order in which modules return first."""

    def __init__(self) -> None:
        self.results: dict[str, list[list[Tensor]]] = {}
        self.last_places: dict[str, int] = {}
        """Place of the last call of each module among all calls."""
        self._num_calls = 0

    def watch(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Note each call of these modules from now on."""
        for name, module in named_modules:
            module.register_forward_hook(partial(self._note, name))

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        leaves = [leaf.detach().clone() for leaf in tensors_of(output) if leaf.is_floating_point()]
        # A run with stand-ins, which hold no values or NaN, is none of a microbatch.
        if any(leaf.is_meta or bool(leaf.isnan().any()) for leaf in leaves):
            return
        self._num_calls += 1
        self.results.setdefault(name, []).append(leaves)
        self.last_places[name] = self._num_calls

    def place(self, module: str) -> int:
        """Return the place of a module's last call, or of the nearest one around it that is called; else -1."""
        while module not in self.last_places and module:
            module = module.rpartition(".")[0]
        return self.last_places.get(module, -1)

    def first_other(self, logs: Sequence["CallLog"], tolerance: float) -> str:
        """Return the first module that returned in other logs what it never returned in this one; empty if none did."""
        for name, results in self.results.items():
            largest = max((largest_of(leaf) for result in results for leaf in result), default=0.0)
            is_close = partial(_are_close, largest=largest, tolerance=tolerance)
            other_results = [result for log in logs for result in log.results.get(name, [])]
            if any(not any(is_close(other, result) for result in results) for other in other_results):
                return name
        return ""


@torch.no_grad()
def _are_close(leaves: Sequence[Tensor], others: Sequence[Tensor], *, largest: float, tolerance: float) -> bool:
    return len(leaves) == len(others) and all(
        error_between(leaf, other, largest)[0] <= tolerance for leaf, other in zip(leaves, others, strict=True)
    )
