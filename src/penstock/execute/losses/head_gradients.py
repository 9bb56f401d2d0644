"""The gradient of a weight that each chunk of a loss multiplies with, such as a head: one sum, and not one for each.

    autograd      chunk 0: dw0    chunk 1: dw0 + dw1, beside dw1    ...
    HeadProducts  chunk 0: dw     chunk 1: dw += dy1.T @ x1         ...   handed to autograd by the last chunk

A head is as large as a vocabulary is, so a second gradient of it may be larger than all that a chunk needs. In a split
backward the products run in I: what W would need of them is the gradient of all logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@dataclass(slots=True, eq=False)
class GradientSum:
    """The gradient of one weight over all chunks."""

    num_products: int = 0
    """Products that the loss depends on, each of which has one backward."""
    num_done: int = 0
    """Backwards that have run."""
    total: Tensor | None = None

    def add(self, output_gradient: Tensor, inputs: Tensor) -> Tensor | None:
        """Add the gradient of one product; return the sum behind the last one, else None."""
        if self.total is None:
            self.total = output_gradient.T @ inputs
        else:
            self.total.addmm_(output_gradient.T, inputs)
        self.num_done += 1
        if self.num_done < self.num_products:
            return None
        total, self.total, self.num_done = self.total, None, 0
        return total


class HeadProducts(TorchFunctionMode):
    """Adds up the gradients of the weights of linear layers that run within it, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[nn.Parameter, GradientSum] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and not kwargs and _is_summed(*args[:2]):
            return self._product(*args)
        return func(*args, **(kwargs or {}))

    def _product(self, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
        gradient_sum = self._sums.setdefault(weight, GradientSum())
        product: Tensor = _HeadProduct.apply(inputs, weight, bias, gradient_sum)  # type: ignore[no-untyped-call]
        return product


def count_products(results: Tensor, hidden: Tensor) -> None:
    """Count, for each sum, the products between hidden states and what the loss makes of all chunks.

    Not every product of the forward has a backward: DoRA detaches the norm of a weight that it makes of products. And
    those of a checkpoint that runs again are in no graph.
    """
    seen, nodes = {None, hidden.grad_fn}, [results.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        gradient_sum = getattr(node, "gradient_sum", None)
        if isinstance(gradient_sum, GradientSum):
            gradient_sum.num_products += 1
        nodes += [next_node for next_node, _ in node.next_functions]


def _is_summed(inputs: Tensor, weight: Tensor) -> bool:
    """Whether a product has a gradient of a whole parameter, in the type of its inputs."""
    is_trained = torch.is_grad_enabled() and type(weight) is nn.Parameter and weight.requires_grad
    return is_trained and inputs.dtype == weight.dtype and not torch.is_autocast_enabled(inputs.device.type)


class _HeadProduct(torch.autograd.Function):
    """A linear layer whose gradient of the weight is part of a sum."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, gradient_sum: GradientSum) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.gradient_sum = gradient_sum
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, _, needs_bias, _ = ctx.needs_input_grad
        rows = output_gradient.flatten(0, -2)
        weight_gradient = ctx.gradient_sum.add(rows, inputs.flatten(0, -2))
        return (
            output_gradient @ weight if needs_inputs else None,
            weight_gradient,
            rows.sum(0) if needs_bias else None,
            None,
        )
