"""`SplitPlan`: how the backwards of a stage are split, from what the graphs of earlier forwards have shown.

Graphs are searched in the input part. What that cannot part is parted in the forward from the next step on: weights of
layers that run again in the backward (checkpointing) or whose activations are moved away (offloading). Where torch's
own layers do not show all of their products, every function is watched; what that does not show either stays whole.
And the gradient of a small matrix takes less time than to part it, so it stays whole. What is decided holds for a step
at least, so that gradients add up in one order.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import MAX_SHOWN
from penstock.execute.split.deferred_weights import DeferredWeights, Watch
from penstock.execute.split.graph_search import Survey, search
from penstock.execute.split.parted_products import Parting
from penstock.execute.split.watched_layers import WatchedLayers, watching_all

SMALL = 2**21
"""Multiplications in a weight's gradient below which it stays whole: `bench/split_backward.py --border` shows that to
part it then takes longer than to compute it."""
_GROWTH = 2
"""How much larger a batch must be than the one that showed the sizes, for them to be looked at again."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What is parted in the forward."""

    weights: frozenset[int] = frozenset()
    """Ids of parameters."""
    watches_all: bool = False
    """Whether every function is watched, not only layers that hold these weights."""


class SplitPlan:
    """How the backwards of some layers are split."""

    def __init__(self, modules: Sequence[nn.Module], *, small: float = SMALL) -> None:
        """`small` is how many multiplications a weight's gradient must take to be left for later."""
        self._modules = modules
        self._small = small
        self._num_elements = 0
        self._is_new_step = True
        self._sizes: dict[int, float] | None = None
        self._whole: frozenset[int] = frozenset()
        self._hooked: set[int] = set()
        self._missed: set[int] = set()
        """Ids of weights whose products were not parted though their layers were watched."""
        self._unpartable: set[int] = set()
        """Ids of those that watching every function does not part either."""
        self._has_failed = False
        self._way = _Way()
        self._searches = True
        self._watch: Watch = _watching_nothing

    def begin_step(self) -> None:
        """Let the next forward decide anew."""
        self._is_new_step = True

    def start(self, num_elements: int) -> DeferredWeights:
        """Return what the forward that comes next will leave for later; the size is that of the stage's inputs."""
        if self._is_new_step:
            self._is_new_step = False
            self._decide(num_elements)
        return DeferredWeights(self._survey if self._searches else None, self._way.weights, self._watch, self._give_up)

    @property
    def is_settled(self) -> bool:
        """Whether the next step will part what this one does, but for small weights."""
        way = self._next_way()
        return way.watches_all == self._way.watches_all and way.weights <= self._way.weights | self._whole

    def stays_whole(self, weight: Tensor) -> bool:
        """Whether a weight is too small to be left for later."""
        return self._sizes is not None and self._sizes.get(id(weight), self._small) < self._small

    def _decide(self, num_elements: int) -> None:
        if num_elements > _GROWTH * self._num_elements:
            self._num_elements, self._sizes = num_elements, None
        sizes = self._sizes or {}
        self._whole = frozenset(key for key, size in sizes.items() if size < self._small)
        way = self._next_way()
        is_new = way != self._way
        if is_new:
            self._way = way
            self._watch = self._watch_for(way)
        # Where all is small or stays whole anyway, there is nothing left to be found, once that is seen to be so.
        is_all_known = self._sizes is not None and (self._whole | self._hooked).issuperset(sizes)
        self._searches = is_new or not is_all_known or bool(way.weights)

    def _next_way(self) -> _Way:
        if self._has_failed:
            return _Way()
        weights = frozenset(self._hooked - self._whole - self._unpartable)
        if weights == self._way.weights and (self._way.watches_all or self._missed.isdisjoint(weights)):
            return self._way
        is_complete = self._missed.isdisjoint(weights) and WatchedLayers(self._modules, weights).is_complete
        return _Way(weights, watches_all=not is_complete)

    def _watch_for(self, way: _Way) -> Watch:
        if not way.weights:
            return _watching_nothing
        return watching_all if way.watches_all else WatchedLayers(self._modules, way.weights).watching

    def _survey(self, edges: Sequence[GradientEdge], seen: Set[int]) -> Survey:
        survey = search(edges, self._whole)
        if self._sizes is None:
            self._sizes = {}
        for key, size in survey.sizes.items():
            self._sizes.setdefault(key, size)
        missed = self._unpartable if self._way.watches_all else self._missed
        missed |= (survey.hooked & self._way.weights) - seen
        self._hooked |= survey.hooked
        return survey

    def _give_up(self, weights: frozenset[int]) -> str:
        self._has_failed = True
        names = {
            id(weight): f"{type(module).__name__}.{name}"
            for module in self._modules
            for name, weight in module.named_parameters()
            if id(weight) in weights
        }
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        return ", ".join([*names.values()][:MAX_SHOWN]) + more


@contextmanager
def _watching_nothing(parting: Parting) -> Iterator[None]:
    yield
