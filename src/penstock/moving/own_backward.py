"""Stages that bring their own backward instead of autograd's, as Fast-LLM's do.

class Scale(nn.Module):
    def forward(self, features):  # [batch, width]
        return features * self.weight, features             output, context

    def backward(self, gradient, context):
        add_gradient(self.weight, (gradient * context).sum(0))
        return gradient * self.weight                        the input's gradient

layers = [own_backward(Scale()), ...]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.execute.values.tree import TreeSpec, flatten, map_leaves


def own_backward(module: nn.Module) -> nn.Module:
    """Return a layer that runs `module` forward and, in the backward, `module.backward`.

    `module(*inputs)` returns `(output, context)`, without a graph. `module.backward(gradient, context)` returns the
    gradient of the input, in its form, or None where it has none; of several inputs, a tuple. `gradient` has the
    output's form, with zeros where nothing came back. The gradients of its own weights it adds to their `.grad`
    (`add_gradient`), so a split schedule finds nothing to defer and runs all of it in I.
    Parameters are named `module.` and their name.

    Raises:
        PipelineError: the module has no `backward`; in the forward, if it does not return a pair.
    """
    return _OwnBackward(module)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to the parameter's `.grad`, as autograd does; a frozen parameter gets none."""
    if parameter.requires_grad:
        parameter.grad = gradient.detach() if parameter.grad is None else parameter.grad + gradient.detach()


@dataclass(frozen=True, slots=True)
class _TreeForm:
    """A tree without its tensors, which autograd's functions take and return as a flat list."""

    spec: TreeSpec
    constants: tuple[Any, ...]
    """The leaves of the tree, with `_IS_TENSOR` in place of each tensor."""

    @classmethod
    def of(cls, tree: Any) -> tuple["_TreeForm", list[Tensor]]:
        """Return the form of a tree, and its tensors in order."""
        leaves, spec = flatten(tree)
        constants = tuple(_IS_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, constants), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Return a tree of this form with other tensors."""
        remaining_tensors = iter(tensors)
        leaves = [next(remaining_tensors) if constant is _IS_TENSOR else constant for constant in self.constants]
        return self.spec.unflatten(leaves)

    def tensors_of(self, tree: Any) -> list[Any]:
        """Return the values of a tree where this form has tensors; a None may stand for a whole branch."""
        values = self.spec.spread(tree, lambda value: isinstance(value, Tensor), "the gradient of the input")
        return [value for value, constant in zip(values, self.constants, strict=True) if constant is _IS_TENSOR]


_IS_TENSOR = object()


class _OwnBackward(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not callable(getattr(module, "backward", None)):
            raise PipelineError(
                f"{type(module).__name__} has no backward; add backward(gradient, context), or use the module as it is"
            )
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        form, tensors = _TreeForm.of(inputs)
        call = _Call(self.module, form)
        # Autograd runs the backward only if an input needs a gradient. Tokens need none, and the weights are no inputs.
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        outputs = _Function.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        assert call.outputs is not None
        return call.outputs.filled(outputs)


@dataclass(slots=True, eq=False)
class _Call:
    """One forward, until its backward has run."""

    module: Any
    inputs: _TreeForm
    outputs: _TreeForm | None = None
    context: Any = None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the module on input tensors, keep its context, and return the output's tensors."""
        returned = self.module(*self.inputs.filled(tensors))
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise PipelineError(
                f"{type(self.module).__name__} returned a {type(returned).__name__}; a module with its own backward "
                "returns a pair (output, context)"
            )
        output, self.context = returned
        self.outputs, output_tensors = _TreeForm.of(output)
        return output_tensors

    def backward(self, gradients: Sequence[Tensor]) -> list[Any]:
        """Return the gradient of each input tensor, which the module's own backward computes."""
        assert self.outputs is not None
        output_gradients = self.outputs.filled(gradients)
        # A leaf of the output that is no tensor has no gradient.
        gradient = map_leaves(lambda leaf: leaf if isinstance(leaf, Tensor) else None, output_gradients)
        input_gradients = self.module.backward(gradient, self.context)
        return self.inputs.tensors_of(input_gradients if len(self.inputs.spec.names) > 1 else (input_gradients,))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward(tensors)
        ctx.call = call
        ctx.mark_non_differentiable(*[output for output in outputs if not output.is_floating_point()])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        call, ctx.call = ctx.call, None
        with torch.no_grad():
            return (None, None, *call.backward(gradients))
