"""Which keyword arguments a layer's forward can take: those that it names, and those of the modules that it wraps.

`torch.compile`, checkpoint wrappers, DistributedDataParallel and users' own wrappers have a `forward(*args, **kwargs)`
that names nothing. It can take what the module behind it can take. torch's wrappers hold that module as their only
child. In other classes the source shows where `**kwargs` goes. If it may go elsewhere, the layer gets every keyword: a
layer that gets one too many fails, but a layer that gets one too few computes something else.

Guarantees: ranks that are threads may look at their layers at one time.
Relies on: nothing else of this process parses Python meanwhile.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from torch import nn

from penstock.execute.batch.microbatch import ANY_KEYWORD
from penstock.execute.undocumented import traced_arguments
from penstock.microbatch_place import MICROBATCH_PLACE

_PARSING_LOCK = Lock()
"""Two threads that parse at a time may fail: CPython counts their depth together (gh-106905)."""


@dataclass(frozen=True, slots=True)
class TakenKeywords:
    """The keywords that a forward can take."""

    positions: Mapping[str, int | None]
    """By name, the place among the positional arguments; None where a parameter is keyword-only."""
    accepts_any_keyword: bool = False
    """Whether any other keyword may matter as well: the forward has `**kwargs`, and may use them itself."""

    def names(self, num_positional: int = 1) -> set[str]:
        """Return the names that a batch may fill when the first `num_positional` are filled; `ANY_KEYWORD` for all."""
        free = self._free_names(num_positional) - {MICROBATCH_PLACE}
        return free | {ANY_KEYWORD} if self.accepts_any_keyword else free

    @property
    def takes_microbatch_place(self) -> bool:
        """Whether the forward names the parameter `microbatch_place`; a `**kwargs` is not given it."""
        return MICROBATCH_PLACE in self.positions

    def select(self, kwargs: Mapping[str, Any], num_positional: int = 1) -> dict[str, Any]:
        """Return the entries of `kwargs` that the forward can take, but for those taken by position."""
        free = self._free_names(num_positional)
        if self.accepts_any_keyword:
            free |= kwargs.keys() - self.positions.keys() - {MICROBATCH_PLACE}
        return {name: value for name, value in kwargs.items() if name in free}

    def _free_names(self, num_positional: int) -> set[str]:
        return {name for name, position in self.positions.items() if position is None or position >= num_positional}


def taken_keywords(module: nn.Module) -> TakenKeywords:
    """Look at the signature of a layer's forward, and at what it wraps if it has `**kwargs`."""
    return _taken(module, module.forward)


def _taken(module: nn.Module, forward: Callable[..., Any]) -> TakenKeywords:
    parameters = _parameters(forward)
    if parameters is None:
        return TakenKeywords({}, accepts_any_keyword=True)
    positions = {
        item.name: None if item.kind is item.KEYWORD_ONLY else position
        for position, item in enumerate(parameters)
        if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)
    }
    if not any(item.kind is item.VAR_KEYWORD for item in parameters):
        return TakenKeywords(positions)
    keywords_of_callees = _keywords_of_callees(module, forward)
    if keywords_of_callees is None:
        return TakenKeywords(positions, accepts_any_keyword=True)
    for callee_keywords in keywords_of_callees:
        positions = {**callee_keywords.positions, **positions}
    return TakenKeywords(positions, any(keywords.accepts_any_keyword for keywords in keywords_of_callees))


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a forward without `self`; None where nothing is known of them."""
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        names = traced_arguments(forward)
    if names is None:
        return None
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, kind) for name in names]


def _keywords_of_callees(module: nn.Module, bound_forward: Callable[..., Any]) -> list[TakenKeywords] | None:
    """Return the keywords that a forward's `**kwargs` may hold: one entry for each submodule that it passes them on to.

    The source of the forward is parsed for calls such as `self.inner(x, **kwargs)` or `super().forward(x, **kwargs)`.
    None means that the forward may use the keywords in another way, or that it has no source that could be read.
    """
    forward = inspect.unwrap(bound_forward)
    while isinstance(forward, partial):
        forward = inspect.unwrap(forward.func)
    # torch's wrappers, such as DistributedDataParallel, pass everything on to their only child. What counts is whether
    # torch has defined the forward, not the class: for each layer that torch shards or parametrizes it makes a class,
    # which inherits the user's forward.
    children = list(module.children())
    if len(children) == 1 and str(getattr(forward, "__module__", "")).startswith("torch."):
        return [taken_keywords(children[0])]
    try:
        text = textwrap.dedent(inspect.getsource(forward))
        with _PARSING_LOCK:
            (definition,) = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    # The module whose attributes the forward calls. A decorated method is found unbound behind its decorator.
    owner = getattr(forward, "__self__", None) or getattr(bound_forward, "__self__", None)
    if not isinstance(definition, ast.FunctionDef) or not definition.args.kwarg or not isinstance(owner, nn.Module):
        return None
    # Of all nodes of the source, those that pass `**kwargs` on to a submodule or to the base class count. Every other
    # use of the name may read the keywords.
    nodes = list(ast.walk(definition))
    kwargs_name = definition.args.kwarg.arg
    num_uses = sum(isinstance(node, ast.Name) and node.id == kwargs_name for node in nodes)
    parameters = [*definition.args.posonlyargs, *definition.args.args]
    keywords_of_callee = partial(_keywords_of_callee, owner, forward, parameters[0].arg if parameters else "")
    keywords_of_calls = [
        keywords for node in nodes if (keywords := _keywords_of_call(node, kwargs_name, keywords_of_callee))
    ]
    return keywords_of_calls if len(keywords_of_calls) == num_uses else None


def _keywords_of_call(
    node: ast.AST, kwargs_name: str, keywords_of_callee: Callable[[str], TakenKeywords | None]
) -> TakenKeywords | None:
    """Return the keywords that `**kwargs` may fill in a call, as in `self.inner(x, **kwargs)`; None for other nodes.

    The callee may also be the first argument of a function for checkpointing, as in `checkpoint(self.inner, x)`.
    """
    if not isinstance(node, ast.Call):
        return None
    if not any(keyword.arg is None and ast.unparse(keyword.value) == kwargs_name for keyword in node.keywords):
        return None
    callee_node, positional = node.func, node.args
    if positional and "checkpoint" in ast.unparse(callee_node).rpartition(".")[2]:
        callee_node, positional = positional[0], positional[1:]
    accepted = keywords_of_callee(ast.unparse(callee_node))
    if accepted is None:
        return None
    # Arguments that the call gives itself are not free for `**kwargs`.
    filled_names = {keyword.arg for keyword in node.keywords}
    positions = accepted.positions
    if not any(isinstance(argument, ast.Starred) for argument in positional):
        filled_names |= {name for name, at in positions.items() if at is not None and at < len(positional)}
    free_positions = {name: position for name, position in positions.items() if name not in filled_names}
    return TakenKeywords(free_positions, accepted.accepts_any_keyword)


def _keywords_of_callee(
    owner: nn.Module, forward: Callable[..., Any], self_name: str, text: str
) -> TakenKeywords | None:
    """Return the keywords of a callee: a submodule, or the forward of the base class; None for any other."""
    if text == "super().forward":
        function = getattr(forward, "__func__", forward)
        classes: list[Any] = [class_ for class_ in type(owner).__mro__ if "forward" in vars(class_)]
        homes = [class_ for class_ in classes if inspect.unwrap(vars(class_)["forward"]) is function]
        return _taken(owner, super(homes[0], owner).forward) if homes else None
    name, _, path = text.removesuffix(".forward").partition(".")
    submodules = dict(owner.named_modules(remove_duplicate=False))
    return taken_keywords(submodules[path]) if name == self_name and path and path in submodules else None
