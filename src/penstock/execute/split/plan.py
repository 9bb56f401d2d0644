"""`SplitPlan`: how the backwards of a stage are split, from what the graphs of earlier forwards have shown.

Graphs are searched in the input part. What that cannot part is parted in the forward from the next step on: weights of
layers that run again in the backward (checkpointing) or whose activations are moved away (offloading). And the gradient
of a small matrix takes less time than to part it, so it stays whole. What is decided holds for a step at least, so that
gradients add up in one order.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.execute.split.deferred_weights import DeferredWeights, Watch
from penstock.execute.split.graph_search import Survey, search
from penstock.execute.split.parted_products import Parting
from penstock.execute.split.watched_layers import WatchedLayers, watching_all

SMALL = 2**21
"""Multiplications in a weight's gradient below which it stays whole: `bench/split_backward.py --border` shows that to
part it then takes longer than to compute it."""
_GROWTH = 2
"""How much larger a batch must be than the one that showed the sizes, for them to be looked at again."""


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
        self._is_opaque = False
        self._parted: frozenset[int] | None = frozenset()
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
        return DeferredWeights(self._survey if self._searches else None, self._parted, self._watch)

    @property
    def is_settled(self) -> bool:
        """Whether the next step will part what this one does, but for small weights."""
        if self._parted is None:
            return self._is_opaque
        return not self._is_opaque and self._hooked <= self._parted | self._whole

    def stays_whole(self, weight: Tensor) -> bool:
        """Whether a weight is too small to be left for later."""
        return self._sizes is not None and self._sizes.get(id(weight), self._small) < self._small

    def _decide(self, num_elements: int) -> None:
        if num_elements > _GROWTH * self._num_elements:
            self._num_elements, self._sizes = num_elements, None
        sizes = self._sizes or {}
        self._whole = frozenset(key for key, size in sizes.items() if size < self._small)
        parted = None if self._is_opaque else frozenset(self._hooked - self._whole)
        is_new = parted != self._parted
        if is_new:
            self._parted = parted
            self._watch = watching_all if parted is None else WatchedLayers(self._modules, parted).watching
        # Where all is small or parted in the forward, there is nothing left to be found, once that is seen to be so.
        is_all_known = self._sizes is not None and (self._whole | self._hooked).issuperset(sizes)
        self._searches = not self._is_opaque and (is_new or not is_all_known)

    def _survey(self, edges: Sequence[GradientEdge], seen: Set[int]) -> Survey:
        survey = search(edges, self._whole)
        if self._sizes is None:
            self._sizes = survey.sizes
        if self._parted is not None and (survey.hooked & self._parted) - seen:
            self._is_opaque = True  # something else than the layers that hold them uses these weights
        self._hooked |= survey.hooked
        self._is_opaque |= survey.is_opaque
        return survey


@contextmanager
def _watching_nothing(parting: Parting) -> Iterator[None]:
    yield
