"""`DeferredWeights`: has a stage's forward leave the gradients of its weights for later.

                 forward                              I                            W
    x ----> x @ W.detach() ----> y        dy ----> dx  (autograd)
    x, W -> kept aside                    dy -> kept with x            dW = x.T @ dy -> W.grad

While it is active, a product of activations and weights takes its weights detached. So the graph of the stage leads to
its inputs alone: an ordinary backward through it is the input part, costs no more than that, and frees it. Of each
product the activations and the gradient of the output are kept until the weight part; nothing is searched, nothing runs
twice. What is no such product stays in the graph, weights included.

[1] Activations are kept through `save_for_backward`, as autograd itself would: activation checkpointing then keeps them
    out of memory, and its one recomputation, in the input part, brings them back. Offloading works alike, and a change
    in place is noticed.
[2] A recomputation must take the same way as its forward, so the backward needs this to be active, too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from penstock.execute.weight_products import WeightProduct, find_product

_MAX_NODES = 16
_GROUP_BYTES = 2**20
_IS_PRODUCT = "penstock.product"
_PLAIN = (Tensor, nn.Parameter)


class DeferredWeights(TorchFunctionMode):
    """The weight gradients of one forward that its input part leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[_Use] = []
        """In the order in which a whole backward would come to them; filled by the input part."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, with its weights detached if it is a product."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled function stays whole, with its weights in the graph
            return func(*args, **kwargs)
        product = find_product(func, args, kwargs)
        if product is None or not _can_be_deferred(product):
            return func(*args, **kwargs)
        return _run_detached(product, self.uses)

    def add_gradients(self) -> None:
        """Add the gradients of the weights, once; hooks see one gradient per weight, the sum over its uses."""
        uses = list(self.uses)
        self.uses.clear()  # a use knows this list: left in it, it would live on
        is_derived = any(weight.grad_fn is not None for weight in _weights_of(uses))  # [2] on the way to the parameters
        with self if is_derived else nullcontext(), torch.enable_grad():
            roots = [_apply(_WeightGradients, group, *_weights_of(group)) for group in _groups(uses)]
            del uses
            if roots:
                torch.autograd.backward(roots)


class _Use:
    """One product: first where its activations are saved, then these and the gradient of its output."""

    __slots__ = ("_activations", "_all_uses", "_gradient", "_gradients", "_needs", "_saved", "weights")

    def __init__(self, saved: Node | None, product: WeightProduct, uses: "list[_Use]") -> None:
        self._saved: Any = saved
        self._needs = [weight is not None and weight.requires_grad for weight in product.weights]
        self.weights = [weight for weight in product.weights if weight is not None and weight.requires_grad]
        self._gradients = product.gradients
        self._all_uses = uses
        self._activations: Any = None
        self._gradient: Tensor | None = None

    def receive(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the gradient of the output when the backward comes by; without one there is nothing to be done."""
        self._gradient = gradients[0]
        self._activations = self._saved.saved_tensors[0]  # [1] recomputes, if it must
        self._saved = None
        if self._gradient is not None:
            self._all_uses.append(self)

    def finish(self) -> list[Tensor]:
        """Return the gradients of the weights that need one, and let go of everything."""
        assert self._gradient is not None
        found = self._gradients(self._activations, self._gradient, self._needs)
        self._activations = self._gradient = None
        return [
            gradient if gradient.dtype == weight.dtype else gradient.to(weight.dtype)
            for gradient, weight in zip(found, self.weights, strict=True)
        ]


def _can_be_deferred(product: WeightProduct) -> bool:
    if not torch.is_grad_enabled():
        return False
    weights = [weight for weight in product.weights if weight is not None]
    return (
        any(weight.requires_grad for weight in weights)
        and all(_is_weight(weight) for weight in weights)
        and type(product.activations) in _PLAIN
        and not product.activations.is_complex()
    )


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or made of parameters alone in a few steps, such as a cast."""
    if type(tensor) not in _PLAIN:
        return False
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter) or not tensor.requires_grad
    nodes, waiting = 0, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        nodes += 1
        is_foreign = hasattr(node, "variable") and not isinstance(node.variable, nn.Parameter)
        if is_foreign or nodes > _MAX_NODES or _IS_PRODUCT in _notes(node):
            return False
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return True


def _run_detached(product: WeightProduct, uses: list[_Use]) -> Tensor:
    activations = product.activations
    anchor = torch.empty((), requires_grad=True)
    # Before the product itself: a recomputation ends with the last tensor saved, so it can leave out the last product.
    saved = _apply(_Keep, anchor, activations.detach()).grad_fn
    detached = [None if weight is None else weight.detach() for weight in product.weights]
    if product.is_in_graph:
        output = product.call(*detached)
    else:  # nothing else makes it part of the graph
        output = _apply(_Beginning, anchor, lambda: product.call(*detached))
    assert output.grad_fn is not None
    _notes(output.grad_fn)[_IS_PRODUCT] = True
    output.grad_fn.register_prehook(_Use(saved, product, uses).receive)
    return product.finish(output)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    output: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return output


def _notes(node: Node) -> dict[Any, Any]:
    """What may be noted on a node of autograd; torch declares the property as a method."""
    notes: Any = node.metadata
    return cast(dict[Any, Any], notes)


class _Keep(torch.autograd.Function):
    """Saves a tensor as autograd saves it [1], beside the graph; its backward never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _Beginning(torch.autograd.Function):
    """Begins a graph with an output that has no differentiable input but its weights."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Callable[[], Tensor]) -> Tensor:
        return call()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _WeightGradients(torch.autograd.Function):
    """Computes the weight gradients of some products as a node of autograd, which adds them up and calls the hooks."""

    @staticmethod
    def forward(ctx: Any, group: list[_Use], *weights: Tensor) -> Tensor:
        ctx.group = group
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None]
        for use in ctx.group:
            found += use.finish()
        return tuple(found)


def _weights_of(group: list[_Use]) -> list[Tensor]:
    return [weight for use in group for weight in use.weights]


def _groups(uses: list[_Use]) -> list[list[_Use]]:
    """Few nodes for small weights, and only a few large gradients at a time; autograd runs the last group first."""
    groups: list[list[_Use]] = []
    num_bytes = _GROUP_BYTES
    for use in uses:
        own_bytes = sum([weight.nbytes for weight in use.weights])
        num_bytes += own_bytes
        if num_bytes > _GROUP_BYTES:
            groups.append([])
            num_bytes = own_bytes
        groups[-1].append(use)
    return groups[::-1]
