"""Has a forward run its products of activations and weights as nodes whose backward can leave the weights for later.

                 forward                              I                            W
    x, W -> x @ W ----> y                dy ----> dx                     dW = x.T @ dy -> W.grad
    x -> kept                            x, dy -> kept

This is for what a search of the graph cannot part: activations that others keep, such as checkpointing, can be asked
for only once, and autograd's own nodes tell them to nobody. The node of such a product does: it is a product that the
search finds like any other. Without a search it is one like any other, too: its backward computes all gradients, so
whatever else runs a backward through it, such as a layer that takes a gradient within its forward, gets what is right.

[1] Activations are kept through `save_for_backward`, as autograd itself would: activation checkpointing then keeps them
    out of memory, and its one recomputation, in the input part, brings them back. Offloading works alike, and a change
    in place is noticed.
[2] Checkpointing tells tensors by the order in which they are saved, and ends its recomputation at the last one. So in
    a recomputation the same tensors are saved at the same place, before the product runs, which leaves out the last
    product. What the product then saves itself is for other kinds of recomputation, which run a backward through it.
[3] A mode is off while a function that it sees runs. A backward within a layer's forward may have layers run again, so
    it is called with edges in the graph in place of tensors: such a call no mode sees.
[4] Whether the tensors that come back are those that were saved is seen by the parameters, which are among them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from penstock.execute.split.late_gradients import LateGradient
from penstock.execute.split.product_nodes import WaitingProduct, keeps_elsewhere
from penstock.execute.split.weight_products import Rule, WeightProduct, Weights, find_product, may_be_product

_MAX_NODES = 16
_PLAIN = (Tensor, nn.Parameter)


class StrangeActivations(RuntimeError):
    """What a recomputation brought back is not what the forward had kept."""


class Parting(TorchFunctionMode):
    """Parts the products of one forward, those of given weights; as a mode, it finds them anywhere."""

    def __init__(self, weights: frozenset[int]) -> None:
        """`weights` are ids of parameters."""
        super().__init__()
        self.is_in_backward = False
        """Whether the backward is running, so that what runs forward is a recomputation."""
        self.seen: set[int] = set()
        """Ids of the weights of products that were parted."""
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
        """Run a function, parted if it is a product."""
        kwargs = kwargs or {}
        if may_be_product(func) and not torch.compiler.is_compiling():  # what is compiled stays whole
            return self.run(func, *args, **kwargs)
        if func is Tensor.backward:
            gradient, retains, creates = (kwargs[name] for name in ("gradient", "retain_graph", "create_graph"))
            with self:
                return torch.autograd.backward(args[0], gradient, retains, creates, None, kwargs["inputs"])
        if func is torch.autograd.grad or func is torch.autograd.backward:
            return self._run_backward(func, args, kwargs)
        return func(*args, **kwargs)

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function that may be a product, parted if it is one."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        product = find_product(function, args, kwargs)
        call = None if product is None else self._call(product)
        if product is None or call is None:
            return function(*args, **kwargs)
        output = call.recompute(product) if self.is_in_backward else call.run(product)
        if output is None:
            return function(*args, **kwargs)
        self.seen.update(map(id, call.parameters))
        return product.finish(output)

    def _run_backward(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a backward within a forward or a recomputation, with this mode on [3]."""
        edges, inputs = [_edges(each) for each in args], kwargs.get("inputs")
        others = {**kwargs} if inputs is None else {**kwargs, "inputs": _edges(inputs)}
        if None in edges or (inputs is not None and others["inputs"] is None) or kwargs.get("materialize_grads"):
            return function(*args, **kwargs)
        with self:
            return function(*edges, **others)

    def _call(self, product: WeightProduct) -> "_Call | None":
        if type(product.activations) not in _PLAIN or product.activations.is_complex():
            return None
        if not any(weight is not None and weight.requires_grad for weight in product.weights):
            return None
        parameters: dict[int, Tensor] = {}
        for weight in product.weights:
            if weight is None:
                continue
            behind = _parameters_behind(weight)
            if behind is None:
                return None
            parameters |= {id(parameter): parameter for parameter in behind}
        if not self._weights.issuperset(parameters):
            return None
        return _Call(product, list(parameters.values()))


class _Call:
    """One product that is parted: what its backward needs to know of it, but for the tensors that are to be saved."""

    __slots__ = ("has_begun", "is_late", "num_multiplications", "opened", "parameters", "rule", "weights")

    def __init__(self, product: WeightProduct, parameters: Sequence[Tensor]) -> None:
        self.rule: Rule = product.rule
        self.weights: Weights = product.weights
        self.parameters = parameters
        self.num_multiplications = _num_multiplications(product)
        self.has_begun = False
        self.is_late = False
        """Whether the weights' gradients are left for later."""
        self.opened: Tensor | None = None
        """The activations, where they have been asked for already."""

    def run(self, product: WeightProduct) -> Tensor | None:
        """Run the product as a node of its own; None where functions of one's own are not allowed, as under vmap."""
        return self._apply(PartedProduct, product.activations, product.bias, self, *product.weights)

    def recompute(self, product: WeightProduct) -> Tensor | None:
        """Save what `run` saves, then run the product beside those who watch what is saved [2]."""
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
            raise StrangeActivations("a recomputation saved other tensors than the forward, or in another order")
        return activations

    def _apply(self, function: type[torch.autograd.Function], *args: Any) -> Tensor | None:
        try:
            output: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
        except RuntimeError:
            if self.has_begun:
                raise
            return None
        return output


class PartedProduct(torch.autograd.Function):
    """A product whose backward leaves the gradients of the weights to a `PartedNode`, if one waits for them."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, bias: Tensor | None, call: _Call, *weights: Tensor | None) -> Tensor:
        call.has_begun = True
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(activations, *call.parameters)  # [1]
        return call.rule.output(activations, weights, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,), call = gradients, ctx.call
        nothing = [None] * len(call.weights)
        if gradient is None:  # the output took no part
            return None, None, None, *nothing
        activations, call.opened = call.activations(ctx), None
        needs_activations, needs_bias, _, *needs = ctx.needs_input_grad
        of_activations = call.rule.input_gradient(gradient, activations, call.weights) if needs_activations else None
        of_weights = nothing if call.is_late else _weight_gradients(call, gradient, activations, needs)
        return of_activations, gradient if needs_bias else None, None, *of_weights


PARTED = f"{PartedProduct.__name__}Backward"
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


class PartedNode(WaitingProduct):
    """The node of such a product in a graph, as a product whose weights may wait."""

    __slots__ = ("_call", "_needs")

    def __init__(self, node: Any) -> None:
        places, self._needs = _places(node)
        self._call: _Call | None = node.call
        super().__init__(node, places, node.call.num_multiplications)

    @property
    def is_hooked(self) -> bool:
        return False  # whoever keeps its activations: the node asks for them once, for itself and for the weights

    def watch(self, late: list[LateGradient]) -> None:
        self._node.call.is_late = True
        super().watch(late)

    def _saved_activations(self) -> Tensor:
        call: _Call = self._node.call
        call.opened = call.activations(self._node).detach()
        return call.opened

    def _weight_gradients(self, gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
        call, self._call = self._call, None
        assert call is not None
        return [each for each in _weight_gradients(call, gradient, activations, self._needs) if each is not None]


def read_parted(node: Any) -> PartedNode | None:
    """Return the node of a parted product as a product, None for others."""
    return PartedNode(node) if isinstance(getattr(node, "call", None), _Call) else None


def _places(node: Any) -> tuple[list[int], list[bool]]:
    """Which next functions of a node are those of weights, and which weights these are; only tensors have any."""
    following = iter(list(enumerate(node.next_functions))[-sum([each is not None for each in node.call.weights]) :])
    places, needs = [], []
    for weight in node.call.weights:
        place, (function, _) = (0, (None, 0)) if weight is None else next(following)
        needs.append(function is not None)
        if function is not None:
            places.append(place)
    return places, needs


def _weight_gradients(call: _Call, gradient: Tensor, activations: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    if not any(needs):
        return [None] * len(needs)
    found = iter(call.rule.weight_gradients(gradient, activations, call.weights, needs))
    gradients: list[Tensor | None] = []
    for weight, is_needed in zip(call.weights, needs, strict=True):
        each = next(found) if is_needed else None
        gradients.append(
            each if each is None or weight is None or each.dtype == weight.dtype else each.to(weight.dtype)
        )
    return gradients


def _num_multiplications(product: WeightProduct) -> float:
    """How many the gradient of a matrix takes; infinite for everything else, whose time is not known."""
    activations, weight = product.activations, product.weights[0]
    if weight is None or weight.dim() != 2 or len(product.weights) > 1 or not activations.is_floating_point():
        return math.inf
    return activations.numel() // max(activations.shape[-1], 1) * weight.numel()


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
    return tensor, tensor._version


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Tensors that pass through hooks are not looked at by autograd."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError("a tensor that a product keeps for its backward has been modified by an inplace operation")
    return tensor


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
        is_parted = isinstance(getattr(node, "call", None), _Call)
        if is_foreign or num_nodes > _MAX_NODES or is_parted or keeps_elsewhere(node):
            return None
        if variable is not None:
            found.append(variable)
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return found
