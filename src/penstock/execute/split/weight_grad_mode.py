"""Has a forward run its products as nodes whose backward can leave the weight gradients for later.

                 forward                              I                            W
    x, W -> x @ W ----> y                dy ----> dx                     dW = x.T @ dy -> W.grad
    x -> kept                            x, dy -> kept

This is for what a search of the graph cannot defer: activations that others keep, such as checkpointing, can be asked
for only once, and autograd's own nodes show them to nobody. The node of a split product does: it is a product that the
search finds like any other. Without a search it is one like any other, too: its backward computes all gradients, so
whatever else runs a backward through it, such as a layer that takes a gradient within its forward, gets what is right.

[1] Activations are kept through `save_for_backward`, as autograd itself would: activation checkpointing then keeps them
    out of memory, and its one recomputation, in I, brings them back. Offloading works alike, and a change in place is
    noticed.
[2] Checkpointing tells tensors by the order in which they are saved, and ends its recomputation at the last one. So in
    a recomputation the same tensors are saved at the same place, before the product runs, which leaves out the last
    product. The tensors that the product then saves itself are for other kinds of recomputation, which run a backward
    through it.
[3] A mode is off while a function that it sees runs. A backward within a layer's forward may have layers run again, so
    it is called with edges in the graph in place of tensors: such a call no mode sees.
[4] Whether the tensors that come back are those that were saved is seen by the parameters, which are among them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from penstock.execute.split.formulas import Convolution, Formula, Weights
from penstock.execute.split.products import FUNCTIONS, CalledProduct, Product, read_call, way_of, weight_gradients
from penstock.execute.split.weight_graph import WeightGraph, open_places
from penstock.execute.undocumented import kind_of_function, version_of

_PLAIN = (Tensor, nn.Parameter)


class RecomputeMismatch(RuntimeError):
    """A recomputation brought back other activations than the forward had saved."""


class WeightGradMode(TorchFunctionMode):
    """Splits the products of one forward, those of given weights; as a mode, it finds them anywhere."""

    def __init__(self, weights: frozenset[int]) -> None:
        """`weights` are ids of parameters."""
        super().__init__()
        self.is_in_backward = False
        """Whether the backward is running, so that a forward is a recomputation."""
        self.seen: set[int] = set()
        """Ids of the weights of products that were split."""
        self._weights = weights
        self._num_entered = 0

    @property
    def is_watching(self) -> bool:
        """Whether it is active as a mode."""
        return self._num_entered > 0

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._num_entered += 1
        return self

    def __exit__(self, *raised: Any) -> None:
        self._num_entered -= 1
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, split if it is a product."""
        kwargs = kwargs or {}
        if func in FUNCTIONS and not torch.compiler.is_compiling():  # what is compiled is not split
            return self.run(func, *args, **kwargs)
        if func is Tensor.backward:
            func, args, kwargs = torch.autograd.backward, args[:1], _of_tensors(*args[1:], **kwargs)
        if func is torch.autograd.grad or func is torch.autograd.backward:
            return self._run_backward(func, args, kwargs)
        return func(*args, **kwargs)

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function that may be a product, split if it is one."""
        product = read_call(function, args, kwargs) if torch.is_grad_enabled() else None
        if product is not None and (call := self._call(product)) is not None:
            output = call.recompute(product) if self.is_in_backward else call.run(product)
            if output is not None:
                self.seen.update(map(id, call.parameters))
                return product.finish(output)
        return function(*args, **kwargs)

    def _run_backward(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a backward within a forward or a recomputation, with this mode on [3]."""
        edges, inputs = [_edges(each) for each in args], kwargs.get("inputs")
        others = {**kwargs} if inputs is None else {**kwargs, "inputs": _edges(inputs)}
        if None in edges or (inputs is not None and others["inputs"] is None) or kwargs.get("materialize_grads"):
            return function(*args, **kwargs)
        with self:
            return function(*edges, **others)

    def _call(self, product: CalledProduct) -> "_Call | None":
        if type(product.activations) not in _PLAIN or product.activations.is_complex():
            return None
        weights = [weight for weight in product.weights if weight is not None]
        if not any(weight.requires_grad for weight in weights):
            return None
        behind = list(map(_parameters_behind, weights))
        parameters = {id(parameter): parameter for found in behind for parameter in found or ()}
        if None in behind or not self._weights.issuperset(parameters):
            return None
        return _Call(product.formula, product.weights, list(parameters.values()))


@dataclass(slots=True, eq=False)
class _Call:
    """One product that is split: what its backward needs to know of it, but for the tensors that are to be saved."""

    formula: Formula
    weights: Weights
    parameters: Sequence[Tensor]
    has_begun: bool = False
    is_deferred: bool = False
    """Whether the weight gradients are left for later."""
    opened: Tensor | None = None
    """The activations, where they have been asked for already."""

    def run(self, product: CalledProduct) -> Tensor | None:
        """Run the product as a node of its own; None where functions of one's own are not allowed, as under vmap."""
        return self._apply(SplitProduct, product.activations, product.bias, self, *product.weights)

    def recompute(self, product: CalledProduct) -> Tensor | None:
        """Save what `run` saves, then run the product hidden from those who watch what is saved [2]."""
        if self._apply(_Keep, self, product.activations.detach(), *self.parameters) is None:
            return None
        with saved_tensors_hooks(_with_version, _unchanged):
            return self.run(product)

    def activations(self, node: Any) -> Tensor:
        """Return what the product's node has kept [4]."""
        if self.opened is not None:
            return self.opened
        activations: Tensor
        activations, *others = node.saved_tensors
        if not all(map(_is_same, others, self.parameters)):
            raise RecomputeMismatch("a recomputation saved other tensors than the forward, or in another order")
        return activations

    def _apply(self, function: type[torch.autograd.Function], *args: Any) -> Tensor | None:
        try:
            output: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
        except RuntimeError:
            if self.has_begun:
                raise
            return None
        return output


class SplitProduct(torch.autograd.Function):
    """A product whose backward leaves the weight gradients to a `Product`, if one waits for them."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, bias: Tensor | None, call: _Call, *weights: Tensor | None) -> Tensor:
        call.has_begun = True
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(activations, *call.parameters)  # [1]
        return call.formula.output(activations, weights, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,), call = gradients, ctx.call
        if gradient is None:  # the output took no part
            return None, None, None, *[None] * len(call.weights)
        activations, call.opened = call.activations(ctx), None
        needs_activations, needs_bias, *_ = ctx.needs_input_grad
        of_activations = call.formula.input_gradient(gradient, activations, call.weights) if needs_activations else None
        of_weights: Weights = [None] * len(call.weights)
        if not call.is_deferred:
            of_weights = weight_gradients(call.formula, gradient, activations, call.weights)
        return of_activations, gradient if needs_bias else None, None, *of_weights


SPLIT_PRODUCT = kind_of_function(SplitProduct)
"""How autograd names the nodes of that function."""


class _Keep(torch.autograd.Function):
    """Saves tensors as autograd saves them [1], beside the graph; its backward never runs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, activations: Tensor, *parameters: Tensor) -> Tensor:
        call.has_begun = True
        ctx.save_for_backward(activations, *parameters)
        return parameters[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def find_split_product(node: Any, graph: WeightGraph) -> Product | None:
    """Find the node of a split product. No matter who keeps its activations: it asks for them once, for I and W."""
    if not _is_split(node):
        return None
    call, num_places = node.call, len(node.next_functions)
    # Of its arguments only tensors have next functions; those of the weights are the last ones.
    num_weights = sum([weight is not None for weight in call.weights])
    needed = open_places(node, range(num_places - num_weights, num_places))
    made_of = graph.at(node, needed)
    if made_of is None:
        return None
    way = way_of(made_of, call.formula)
    return Product(node, made_of, needed, *way, call.formula, _for_weight_gradients(call), _open)


def _for_weight_gradients(call: _Call) -> Weights:
    """Return the weights for W: of a made one, such as a cast copy, only its type, unless it is a kernel."""
    if isinstance(call.formula, Convolution):
        return call.weights
    return [each if each is None or isinstance(each, nn.Parameter) else each.new_empty(0) for each in call.weights]


def _is_split(node: Any) -> bool:
    return isinstance(getattr(node, "call", None), _Call)


def _open(node: Any) -> Tensor:
    """The activations, for a product whose weight gradients are deferred; the node's own backward comes next."""
    call: _Call = node.call
    call.is_deferred = True
    call.opened = call.activations(node).detach()
    return call.opened


def _is_same(found: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor that was saved is a parameter; offloading brings back a copy."""
    if found.shape != parameter.shape or found.dtype != parameter.dtype or found.device != parameter.device:
        return False
    is_same_memory = found.data_ptr() == parameter.data_ptr()
    return is_same_memory or torch.equal(found.nan_to_num(), parameter.nan_to_num())


def _edges(tensors: Tensor | Sequence[Tensor]) -> list[GradientEdge] | None:
    """Where tensors are in the graph; None if one of them is not in it."""
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not all(isinstance(each, Tensor) and each.requires_grad for each in listed):
        return None
    return [get_gradient_edge(each) for each in listed]


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, version_of(tensor)


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Autograd does not look at the versions of tensors that pass through hooks."""
    tensor, version = saved
    if version_of(tensor) != version:
        raise RuntimeError("a tensor that a product keeps for its backward has been modified by an inplace operation")
    return tensor


def _parameters_behind(tensor: Tensor) -> Sequence[Tensor] | None:
    """The parameters that a weight is made of in a few steps, such as a cast; None if not of these alone."""
    if type(tensor) not in _PLAIN:
        return None
    if tensor.grad_fn is None:
        return (tensor,) if isinstance(tensor, nn.Parameter) or not tensor.requires_grad else None
    found = WeightGraph().behind([tensor.grad_fn])
    return None if found is None or any(map(_is_split, found.nodes)) else found.parameters


def _of_tensors(gradient: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of `torch.autograd.backward` for those of `Tensor.backward`."""
    names = ("retain_graph", "create_graph", "inputs")
    return {"grad_tensors": gradient, **dict(zip(names, args, strict=False)), **kwargs}
