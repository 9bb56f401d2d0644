"""Has a forward run its products of activations and weights apart from their weights.

                 forward                              I                            W
    x ----> x @ W.detach() ----> y        dy ----> dx  (autograd)
    x, W -> kept                          x, dy -> kept                dW = x.T @ dy -> W.grad

A product becomes a node of its own, whose backward computes the gradient of the activations and keeps what that of the
weights needs. So the graph leads to the inputs alone, and an ordinary backward through it is the input part. This is
for what a search of the graph cannot part: activations that others keep, and backwards within the backward.

[1] Activations are kept through `save_for_backward`, as autograd itself would: activation checkpointing then keeps them
    out of memory, and its one recomputation, in the input part, brings them back. Offloading works alike, and a change
    in place is noticed.
[2] Checkpointing ends its recomputation at the last tensor saved. So there, tensors are saved before the product runs,
    as autograd does it, which leaves out the last product.
[3] A layer may take a gradient within its forward, such as a force from an energy. That is no backward of the stage:
    it leaves nothing for later, and with `create_graph` it must lead to the weights. What a recomputation computes
    takes part in no other backward, but for reentrant checkpointing, which is why all functions are watched there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.execute.split.late_gradients import LateGradient
from penstock.execute.split.weight_products import Rule, WeightProduct, Weights, find_product, may_be_product

_MAX_NODES = 16
_PLAIN = (Tensor, nn.Parameter)


class Parting(TorchFunctionMode):
    """Parts the products of one forward, those of given weights; as a mode, it finds them anywhere."""

    def __init__(self, late: list[LateGradient], weights: frozenset[int] | None) -> None:
        """`late` is filled by the input part; `weights` are ids, or None for all."""
        super().__init__()
        self.late = late
        self.is_watching = False
        """Whether it is active as a mode."""
        self.is_in_backward = False
        """Whether the input part is running."""
        self.seen: set[int] = set()
        """Ids of the weights of products that were parted."""
        self._weights = weights
        self._takes_gradients = False

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.is_watching = True
        return self

    def __exit__(self, *raised: Any) -> None:
        self.is_watching = False
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, with its weights detached if it is a product."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what is compiled stays whole
            return func(*args, **kwargs)
        if may_be_product(func):
            return self.run(func, *args, **kwargs)
        if func is torch.autograd.grad:
            with self._taking_gradients():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function that may be a product, with its weights detached if it is one."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        product = find_product(function, args, kwargs)
        if product is None or not self._is_deferred(product):
            return function(*args, **kwargs)
        return self._run_parted(product)

    def leaves(self, call: "_Call") -> bool:
        """Whether a backward that comes by a product is the input part, not one within a layer's forward [3]."""
        if not self.is_in_backward or torch.is_grad_enabled():
            return False
        return call.kept is None or (self._weights is None and not self._takes_gradients)

    @contextmanager
    def _taking_gradients(self) -> Iterator[None]:
        before, self._takes_gradients = self._takes_gradients, True
        try:
            yield
        finally:
            self._takes_gradients = before

    def _is_deferred(self, product: WeightProduct) -> bool:
        if type(product.activations) not in _PLAIN or product.activations.is_complex():
            return False
        behind = [_parameters_behind(weight) for weight in product.weights if weight is not None]
        if not any(weight is not None and weight.requires_grad for weight in product.weights):
            return False
        ids: set[int] = set()
        for leaves in behind:
            if leaves is None:
                return False
            ids.update(map(id, leaves))
        if self._weights is not None and not self._weights.issuperset(ids):
            return False
        self.seen |= ids
        return True

    def _run_parted(self, product: WeightProduct) -> Tensor:
        activations, bias = product.activations, product.bias
        detached = tuple([None if weight is None else weight.detach() for weight in product.weights])
        call = _Call(product.rule, product.weights, self)
        if self.is_in_backward:  # [2]
            kept: Any = _apply(_Keep, torch.empty((), requires_grad=True), activations.detach(), *detached).grad_fn
            call.kept = kept
        # Without a differentiable input but its weights, nothing else makes it part of the graph.
        anchor = None if product.is_in_graph else torch.empty((), requires_grad=True)
        return product.finish(_apply(PartedProduct, activations, bias, anchor, detached, call))


class PartedProduct(torch.autograd.Function):
    """A product whose backward is the input part."""

    @staticmethod
    def forward(
        ctx: Any, activations: Tensor, bias: Tensor | None, anchor: Tensor | None, weights: Weights, call: "_Call"
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        if call.kept is None:
            ctx.save_for_backward(activations, *weights)  # [1]
        return call.rule.output(activations, weights, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,), call = gradients, ctx.call
        if gradient is None:  # the output took no part
            return None, None, None, None, None
        activations, *weights = (call.kept or ctx).saved_tensors
        if call.parting.leaves(call):
            call.parting.late.append(_Use(call, activations.detach(), gradient))
        needs_activations, needs_bias, *_ = ctx.needs_input_grad
        found = None
        if needs_activations:
            found = call.rule.input_gradient(
                gradient, activations, call.weights if torch.is_grad_enabled() else weights
            )
        return found, gradient if needs_bias else None, None, None, None


class _Call:
    """What a product's backward needs to know of it; the tensors to be saved are not among it."""

    __slots__ = ("kept", "parting", "rule", "weights")

    def __init__(self, rule: Rule, weights: Weights, parting: Parting) -> None:
        self.rule = rule
        self.weights = weights
        self.parting = parting
        self.kept: Any = None


class _Use:
    """One product in whose output's gradient the backward has come by."""

    __slots__ = ("_activations", "_all_weights", "_needs", "_rule", "gradient", "parameters", "roots")

    def __init__(self, call: _Call, activations: Tensor, gradient: Tensor) -> None:
        self._rule, self._all_weights = call.rule, call.weights
        self._needs = [weight is not None and weight.requires_grad for weight in call.weights]
        self.roots = [weight for weight in call.weights if weight is not None and weight.requires_grad]
        self.parameters = [leaf for weight in self.roots for leaf in _parameters_behind(weight) or ()]
        self._activations: Tensor | None = activations
        self.gradient: Tensor | None = gradient

    def finish(self) -> Sequence[Tensor]:
        """Return the gradients of the weights that need one, and let go of everything."""
        activations, gradient = self._activations, self.gradient
        assert activations is not None
        assert gradient is not None
        self._activations = self.gradient = None
        found = self._rule.weight_gradients(gradient, activations, self._all_weights, self._needs)
        return [
            each if each.dtype == weight.dtype else each.to(weight.dtype)
            for each, weight in zip(found, self.roots, strict=True)
        ]


def _parameters_behind(tensor: Tensor) -> Sequence[Tensor] | None:
    """The parameters that a tensor is made of in a few steps, such as a cast; None if it is not made of these alone."""
    if type(tensor) not in _PLAIN:
        return None
    if tensor.grad_fn is None:
        return (tensor,) if isinstance(tensor, nn.Parameter) or not tensor.requires_grad else None
    found, num_nodes, waiting = [], 0, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        num_nodes += 1
        variable = getattr(node, "variable", None)
        is_foreign = variable is not None and not isinstance(variable, nn.Parameter)
        if is_foreign or num_nodes > _MAX_NODES or node.name() == _PARTED:
            return None
        if variable is not None:
            found.append(variable)
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return found


_PARTED = f"{PartedProduct.__name__}Backward"
"""How autograd names the nodes of that function."""


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    output: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return output


class _Keep(torch.autograd.Function):
    """Saves tensors as autograd saves them [1], beside the graph; its backward never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(*kept)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None
