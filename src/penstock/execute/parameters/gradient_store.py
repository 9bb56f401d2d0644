"""`GradientStore`: the gradients of one unit, which no other code writes. A unit is what shares parameters on a rank.

    before a step    what was there; set aside where only this step's part is wanted, as of what is tied over ranks
    a backward       autograd adds to `.grad`; first gradients get memory of their own
    W                the store adds what waited, one call of autograd for many small weights
    a reduction      an average or a sum takes the place of this rank's own gradient

A parameter without a gradient takes over the first one that comes if nobody holds that very tensor, without a look at
who holds its memory. In a plain loop nobody does; here a backward leaves tensors that outlive it:

    y = x + p.view(...)      dy is kept, sent or forwarded;  p.grad = dy.view(...), the same memory
                             next microbatch: p.grad += ..., which changes dy

So does every other leaf: a keyword of the batch that is trained, a tensor that a layer holds unregistered, a parameter
of the loss function. A split backward, which searches its graph anyway, finds them all.

Main gradients are those of weights in low precision, added up in float32 beside them. A sum of many microbatches in
bfloat16 loses what is small against it: its values have 8 bits. So each microbatch's gradient, which the backward
computes in the type of the weights, is added to `.main_grad` as soon as it is there, and `.grad` is released.
Megatron-LM gave them their name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy

from penstock.errors import ConfigError
from penstock.execute.parameters.gradient_sums import added, dense
from penstock.execute.values.tensors import in_own_memory, in_pieces, memory_of

MAIN_GRAD = "main_grad"
"""Attribute of a parameter: the sum of its gradients in float32 (float64 stays float64), or None."""
_GROUP_BYTES = 2**20


class WeightEntry(Protocol):
    """Gradients of weights that I leaves for W."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters that weights are made of, often themselves; none where the entry writes their gradients."""

    @property
    def roots(self) -> Sequence[GradientEdge]:
        """The edges at which the gradients enter the graph that leads to the parameters."""

    @property
    def held_tensors(self) -> list[Tensor]:
        """The tensors that the entry holds, without parameters."""

    def gradients(self) -> Sequence[Tensor | None]:
        """Compute the gradients, one per root, None where none came, and release everything."""


@dataclass(slots=True, eq=False)
class WeightInputs:
    """The entries that one I leaves for its W."""

    entries: list[WeightEntry]
    """Entries in the order of a whole backward; those that write gradients by themselves are called last."""


class StoredGradients:
    """The gradients of some parameters of one rank, under an attribute of each."""

    def __init__(self, attribute: str = "grad") -> None:
        self.attribute = attribute
        self._set_aside_gradients: dict[nn.Parameter, Tensor | None] = {}
        """Gradients of parameters tied over ranks, accumulated and summed before this step."""

    def set_aside(self, tied: Iterable[nn.Parameter]) -> None:
        """Begin a step of which these have their own part only, until `put_sum`."""
        for parameter in tied:
            self._set_aside_gradients[parameter] = self.of(parameter)
            self.put(parameter, None)

    def end_step(self) -> None:
        """End a step; what was set aside and has found no sum, as in one that fails, is there again."""
        for parameter, gradient in self._set_aside_gradients.items():
            self.put(parameter, gradient)
        self._set_aside_gradients.clear()

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient; of one that is tied, this step's part."""
        gradient: Tensor | None = getattr(parameter, self.attribute)
        return gradient

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Let a gradient, such as an average over replicas, take the place of this rank's own."""
        setattr(parameter, self.attribute, gradient)

    def put_sum(self, parameter: nn.Parameter, total: Tensor | None) -> None:
        """Put the sum over all holders on top of what was accumulated before the step."""
        self.put(parameter, added(self._set_aside_gradients.pop(parameter, None), total))

    def like(self, parameter: nn.Parameter) -> Tensor:
        """Return what has the shape and type of a dense gradient, and no memory."""
        dtype = _type_of(parameter, self.attribute)
        return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)

    def by_type(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the parameters in groups whose gradients have one type."""
        parameters_by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            parameters_by_type.setdefault(self.like(parameter).dtype, []).append(parameter)
        return list(parameters_by_type.values())


class GradientStore(StoredGradients):
    """The gradients that backwards add to."""

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], attribute: str = "grad") -> None:
        """`parameters` returns those that are held now; `attribute` is where their gradients are summed up."""
        super().__init__(attribute)
        self._parameters = parameters
        self._gradless_params: list[nn.Parameter] = []
        """Parameters to which no gradient has come yet in this step."""
        self._initially_trained_ids: set[int] = set()
        """Ids of the parameters that needed a gradient when the step began."""
        self._main_gradient_hooks = ExitStack()

    def begin_step(self) -> None:
        """Begin a training step."""
        parameters = list(self._parameters())
        self._gradless_params = [parameter for parameter in parameters if parameter.requires_grad]
        self._initially_trained_ids = set(map(id, self._gradless_params))
        if self.attribute == MAIN_GRAD:
            self._main_gradient_hooks.enter_context(_summed_beside(parameters))

    def end_step(self) -> None:
        self._main_gradient_hooks.close()
        super().end_step()
        self._gradless_params = []

    def release(self, parameter: nn.Parameter) -> None:
        """Drop a gradient that is reduced; backwards behind it begin a new one."""
        if self.of(parameter) is not None:
            self.put(parameter, None)
            self._gradless_params.append(parameter)

    # ---- a backward

    def begin_backward(self) -> None:
        """Forget the parameters that have a gradient by now, to which later ones are added."""
        if self._gradless_params:
            self._gradless_params = [parameter for parameter in self._gradless_params if parameter.grad is None]

    @contextmanager
    def separate_first_gradients(self) -> Iterator[None]:
        """Give first gradients memory of their own as they come, where somebody else holds theirs at that moment."""
        # Every graph in here has these nodes, as long as they are held.
        nodes = [get_gradient_edge(parameter).node for parameter in self._gradless_params]
        hooks = [node.register_prehook(_in_own_memory) for node in nodes]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def end_backward(
        self, leaves: Sequence[Tensor], needed_tensors: Sequence[Tensor], entries: Sequence[WeightEntry] = ()
    ) -> None:
        """Give first gradients memory of their own where it is that of tensors that are needed later.

        `leaves` are others that the backward has come to, `entries` what it has left for W.
        """
        if not self._gradless_params and not leaves:
            return
        new_leaves: list[Tensor] = [parameter for parameter in self._gradless_params if parameter.grad is not None]
        # Another leaf may have had its gradient before. Then it shares no memory with what this backward made.
        new_leaves += [leaf for leaf in leaves if leaf.grad is not None and id(leaf) not in self._initially_trained_ids]
        if not new_leaves:
            return
        needed_tensors = [*needed_tensors, *(tensor for entry in entries for tensor in entry.held_tensors)]
        _separate(new_leaves, {memory_of(tensor) for tensor in needed_tensors if tensor.layout is torch.strided})

    def add(self, inputs: WeightInputs) -> None:
        """Run W: add what waited, in the order in which a backward comes to it; hooks see one gradient per weight.

        All gradients of a parameter come in one call of autograd, so that its hooks see their sum. There are few calls
        for small parameters, and only a few large gradients at a time.
        """
        entries = inputs.entries
        if not entries:
            return
        self_writing_entries = [entry for entry in entries if not entry.parameters]
        gradless_params = [param for entry in entries for param in entry.parameters if param.grad is None]
        # The entries are in the order in which a whole backward comes to them. All that share a parameter are in one
        # group, in that order, and a group is never cut: so one call of autograd sums all gradients of a parameter, in
        # the order of its roots, and hooks see the sum once, as in a whole backward. Groups share no parameter, hence
        # no gradient: in which calls they come bounds the memory, and changes no bits.
        for groups in in_pieces(_by_parameter([entry for entry in entries if entry.parameters]), _size, _GROUP_BYTES):
            _add_group([entry for group in groups for entry in group])
        _separate(gradless_params, set())
        entries.clear()
        with torch.no_grad():
            while self_writing_entries:
                self_writing_entries.pop(0).gradients()


# ---- main gradients


@contextmanager
def _summed_beside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Add the gradients of every backward in here to the main gradients, and leave `.grad` as it was."""
    have_main(parameters)
    hooks = [
        parameter.register_post_accumulate_grad_hook(_take)  # type: ignore[no-untyped-call]
        for parameter in parameters
        if parameter.requires_grad
    ]
    with without_gradients(parameters):
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in parameters:
                _take(parameter)  # what a layer has added to `.grad` by itself, past the hooks


def have_main(parameters: Iterable[nn.Parameter]) -> None:
    """Let parameters have the attribute for their main gradient."""
    for parameter in parameters:
        if not hasattr(parameter, MAIN_GRAD):
            setattr(parameter, MAIN_GRAD, None)


def main_type(parameter: Tensor) -> torch.dtype:
    """Return the type that a parameter's main gradient has."""
    return torch.promote_types(parameter.dtype, torch.float32)


def require_main_shapes(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Make sure that every parameter can have a main gradient.

    Raises:
        ConfigError: one has no shape before its first input.
    """
    for name, parameter in named_parameters:
        if is_lazy(parameter):
            raise ConfigError(
                f"{name!r} has no shape before its first input, so nothing can be added up beside it; give its layer "
                "its sizes when it is built",
                key="main_gradients",
            )


def dense_gradient(parameter: nn.Parameter, attribute: str) -> Tensor:
    """Return a parameter's gradient, or zeros where it has none; `attribute` says where it is."""
    gradient: Tensor | None = getattr(parameter, attribute)
    if gradient is not None:
        return dense(gradient)
    dtype = _type_of(parameter, attribute)
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)


def _type_of(parameter: Tensor, attribute: str) -> torch.dtype:
    return parameter.dtype if attribute == "grad" else main_type(parameter)


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Have no parameter a gradient in `.grad` when this begins; what was there is there again afterwards."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Drop all gradients, main gradients included."""
    for parameter in parameters:
        parameter.grad = None
        if hasattr(parameter, MAIN_GRAD):
            setattr(parameter, MAIN_GRAD, None)


def _in_own_memory(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else in_own_memory(gradient) for gradient in gradients)


def _take(parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return  # a function of the user's has returned None, for which torch calls hooks, too
    gradient = dense(gradient)
    total = getattr(parameter, MAIN_GRAD)
    if total is None:
        setattr(parameter, MAIN_GRAD, gradient.to(main_type(parameter), copy=True))  # its memory may be another's, too
    else:
        total.add_(gradient)


def _separate(leaves: Sequence[Tensor], needed: set[int]) -> None:
    """Give gradients memory of their own where it is `needed`, or another's, as of u and v in x @ (u.t() + v.t())."""
    for leaf in dict.fromkeys(leaves):
        gradient = leaf.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if (memory := memory_of(gradient)) in needed:
            leaf.grad = gradient.clone()
        needed.add(memory)


def _add_group(group: Sequence[WeightEntry]) -> None:
    # Few calls of autograd, since each takes its time, but not one for all: all gradients would be alive at once,
    # beside those that they are added to.
    roots = [root for entry in group for root in entry.roots]
    with torch.no_grad():  # weights are among what they are computed from
        gradients = [gradient for entry in group for gradient in entry.gradients()]
    edge_gradients = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
    if edge_gradients:
        edges: list[Any] = [root for root, _ in edge_gradients]
        torch.autograd.backward(edges, [gradient for _, gradient in edge_gradients])


def _by_parameter(entries: Sequence[WeightEntry]) -> Iterable[list[WeightEntry]]:
    """Return the entries in groups that share no parameter with each other."""
    groups: dict[int, list[WeightEntry]] = {}  # by id of a parameter
    for entry in entries:
        param_ids = [id(parameter) for parameter in entry.parameters]
        matches = [groups[param_id] for param_id in param_ids if param_id in groups]
        joined_groups = [*{id(match): match for match in matches}.values()]
        group = joined_groups[0] if joined_groups else []
        for joined_group in joined_groups[1:]:
            group += joined_group
            param_ids += [id(parameter) for member in joined_group for parameter in member.parameters]
        group.append(entry)
        groups |= dict.fromkeys(param_ids, group)
    return {id(group): group for group in groups.values()}.values()


def _size(group: Sequence[WeightEntry]) -> int:
    return sum([parameter.nbytes for entry in group for parameter in entry.parameters])
