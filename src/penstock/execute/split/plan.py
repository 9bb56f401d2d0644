"""`SplitPlan`: how the backwards of a stage are split, from what the graphs of earlier forwards have shown.

Graphs are searched in I. Products that the search cannot defer are split in the forward from the next step on: those
of layers that run again in the backward (checkpointing) or whose activations are moved away (offloading). Where torch's
own layers do not show all of these products, every function is watched; what that does not show either has its weight
gradients in I. So do small matrices, whose gradients take less time than to defer them. Custom functions that ask which
half is wanted show that when they first ask. What is decided holds for a step at least, so that gradients add up in one
order.

Weight gradients that cannot wait are computed with the input gradients, as in a whole backward: the gradients and the
order of the schedule stay, and only what the split was to gain is lost. If that is much, the plan says so once.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import MAX_SHOWN, warn
from penstock.execute.split.deferred import Rung
from penstock.execute.split.deferred_weights import DeferredWeights, Watch
from penstock.execute.split.graph_search import Survey, search
from penstock.execute.split.wanted import asks
from penstock.execute.split.watched_layers import WatchedLayers, watching_all, watching_nothing

_LOG = logging.getLogger("penstock")
SMALL = 2**21
"""Multiplications in a weight's gradient below which it is not deferred: `bench/split_backward.py --border` shows that
to defer it then takes longer than to compute it."""
LARGE_SHARE = 0.1
"""Of the weights of a stage, how many must not have waited for the warning."""
_MATRIX = 2
"""Dimensions of a weight whose gradient is worth deferring."""
_GROWTH = 2
"""How much larger a batch must be than the one that showed the sizes, for them to be looked at again."""


@dataclass(frozen=True, slots=True)
class _InForward:
    """What is split in the forward."""

    weights: frozenset[int] = frozenset()
    """Ids of parameters."""
    watches_all: bool = False
    """Whether every function is watched, not only layers that hold these weights."""


@dataclass(frozen=True, slots=True)
class EarlyWeights:
    """The weight gradients of a stage that are computed in I, where W was to compute them.

    Shares are of all elements of matrices in the stage.
    """

    share: float
    names: tuple[str, ...]
    """Of their parameters, small ones too."""
    rungs: Mapping[str, float] = field(default_factory=dict)
    """The shares of all `Rung`s, of what waits, too."""


@dataclass(frozen=True, slots=True)
class WeightRung:
    """What is done about the gradient of one weight."""

    rung: Rung
    multiplications: float | None = None
    """Of its gradient in one microbatch, where that is known."""


class SplitPlan:
    """How the backwards of some layers are split."""

    def __init__(self, modules: Sequence[nn.Module], *, small: float = SMALL) -> None:
        """`small` is how many multiplications a weight's gradient must take to be deferred."""
        self.is_examined = False
        """Whether what cannot wait is known."""
        self.early: EarlyWeights | None = None
        """What cannot wait; None where it is not known."""
        self._modules = modules
        self._border = small
        self._num_elements = 0
        self._is_new_step = True
        self._sizes: dict[int, float] | None = None
        self._small: frozenset[int] = frozenset()
        self._hooked: set[int] = set()
        self._missed: set[int] = set()
        """Ids of weights whose products were not split though their layers were watched."""
        self._unsplittable: set[int] = set()
        """Ids of those that watching every function does not split either."""
        self._has_failed = False
        self._in_forward = _InForward()
        self._functions: set[Any] = set()
        """Custom functions in the graphs of the latest step; a forward may make new ones of its own."""
        self._is_first_search = True
        """Of a step."""
        self._asking: frozenset[Any] = frozenset()
        """Those that are run in two parts."""
        self._has_branches = False
        self._finds_branches = True
        self._rungs: dict[int, Rung] = {}
        """Per id of a weight that waits."""
        self._searches = True
        self._watch: Watch = watching_nothing

    def begin_step(self) -> None:
        """Let the next forward decide anew."""
        self._is_new_step = True

    def start(self, num_elements: int) -> DeferredWeights:
        """Return what the forward that comes next will leave for later; the size is that of the stage's inputs."""
        if self._is_new_step:
            self._is_new_step = False
            self._decide(num_elements)
        search_graph = self._survey if self._searches else None
        return DeferredWeights(search_graph, self._in_forward.weights, self._watch, self._give_up)

    @property
    def is_settled(self) -> bool:
        """Whether the next step will split what this one does, but for small weights."""
        following, now = self._next_in_forward(), self._in_forward
        is_same = following.watches_all == now.watches_all and following.weights <= now.weights | self._small
        return is_same and self._next_asking() == self._asking

    def is_small(self, weight: Tensor) -> bool:
        """Whether a weight is too small for its gradient to be deferred."""
        return self._sizes is not None and self._sizes.get(id(weight), self._border) < self._border

    def rungs(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, WeightRung]:
        """Return for each parameter that is trained by what its gradient waits for W, or why it does not.

        It is that of the latest step; from the step on after which `is_settled`, it stays.
        """
        return {name: self._rung(weight) for name, weight in parameters if weight.requires_grad}

    def _rung(self, weight: nn.Parameter) -> WeightRung:
        key = id(weight)
        size = (self._sizes or {}).get(key, math.inf)
        rung = Rung.SMALL if self.is_small(weight) else self._rungs.get(key)
        if rung is None:
            rung = Rung.SMALL if weight.dim() < _MATRIX else Rung.OPAQUE
        return WeightRung(rung, size if math.isfinite(size) else None)

    @contextmanager
    def examining(self, stage: int, parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """Look which weights get their gradients in a backward of inputs, and warn of them once the plan is settled."""
        matrices = {name: weight for name, weight in parameters if weight.requires_grad and weight.dim() > 1}
        early: set[str] = set()

        def note(name: str, gradient: Tensor | None) -> None:
            if gradient is not None:  # as of a layer that computes its weight gradients later by itself
                early.add(name)

        hooks = [weight.register_hook(partial(note, name)) for name, weight in matrices.items()]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self.is_settled:
            self.is_examined = True
            names = tuple(name for name in matrices if name in early)
            self.early = EarlyWeights(
                _share_of(early, matrices), names, _shares_of(self.rungs(parameters), early, matrices)
            )
            shares = ", ".join(f"{rung} {share:.0%}" for rung, share in self.early.rungs.items())
            _LOG.info("stage %d: %.0f %% of its weights wait for W: %s", stage, 100 * (1 - self.early.share), shares)
            _warn_of(
                stage, [name for name in matrices if name in early and not self.is_small(matrices[name])], matrices
            )

    def _decide(self, num_elements: int) -> None:
        # What is small was measured on a batch; a much larger one may make it worth deferring.
        if num_elements > _GROWTH * self._num_elements:
            self._num_elements, self._sizes = num_elements, None
        sizes = self._sizes or {}
        self._small = frozenset(key for key, size in sizes.items() if size < self._border)
        before, self._in_forward = self._in_forward, self._next_in_forward()
        is_new = before != self._in_forward
        if is_new:
            self._watch = self._watch_for(self._in_forward)
        if self._asking != (asking := self._next_asking()):
            self._asking, is_new = asking, True
        self._is_first_search = True
        self._finds_branches = self._has_branches or self._sizes is None or bool(self._asking)
        if is_new:
            self._rungs = {}
        # Where nothing is deferred there is nothing left to be found, once that is seen to be so.
        is_all_known = self._sizes is not None and (self._small | self._hooked).issuperset(sizes)
        self._searches = is_new or not is_all_known or bool(self._in_forward.weights or self._asking)

    def _next_in_forward(self) -> _InForward:
        if self._has_failed:
            return _InForward()
        now, weights = self._in_forward, frozenset(self._hooked - self._small - self._unsplittable)
        if weights == now.weights and (now.watches_all or self._missed.isdisjoint(weights)):
            return now
        is_complete = self._missed.isdisjoint(weights) and WatchedLayers(self._modules, weights).is_complete
        return _InForward(weights, watches_all=not is_complete)

    def _next_asking(self) -> frozenset[Any]:
        return frozenset(filter(asks, self._functions))

    def _watch_for(self, in_forward: _InForward) -> Watch:
        if not in_forward.weights:
            return watching_nothing
        return watching_all if in_forward.watches_all else WatchedLayers(self._modules, in_forward.weights).watching

    def _survey(self, edges: Sequence[GradientEdge], seen: Set[int]) -> Survey:
        survey = search(edges, self._small, asking=self._asking, finds_branches=self._finds_branches)
        self._functions = survey.functions if self._is_first_search else self._functions | survey.functions
        self._is_first_search = False
        self._has_branches |= bool(survey.branches)
        self._rungs |= survey.rungs()
        self._sizes = survey.sizes | (self._sizes or {})
        missed = self._unsplittable if self._in_forward.watches_all else self._missed
        missed |= (survey.hooked & self._in_forward.weights) - seen
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


def _warn_of(stage: int, early: Sequence[str], matrices: Mapping[str, nn.Parameter]) -> None:
    share = _share_of(early, matrices)
    if share <= LARGE_SHARE:
        return
    more = f" and {len(early) - MAX_SHOWN} more" if len(early) > MAX_SHOWN else ""
    warn(
        f"stage {stage}: {share:.0%} of its weights take their gradients in the `I` of a split backward: "
        f"{', '.join(early[:MAX_SHOWN])}{more}. They are right, but leave `W` less to do, which a schedule "
        "with split backwards lives on. Expected weights that are the right side of products, convolutions or tables "
        "alone, or custom functions whose backward asks ps.wants_weight_gradient(ctx); or use a schedule with whole "
        "backwards. docs/explanations/split_backward.md says for each layer what can wait"
    )


def _share_of(names: Iterable[str], matrices: Mapping[str, nn.Parameter]) -> float:
    num_elements = sum(weight.numel() for weight in matrices.values())
    return sum(matrices[name].numel() for name in names) / num_elements if num_elements else 0.0


def _shares_of(
    rungs: Mapping[str, WeightRung], early: Set[str], matrices: Mapping[str, nn.Parameter]
) -> dict[str, float]:
    """Return the share of each rung; what waits and was not found in any graph waits by the layer itself."""
    names: dict[str, list[str]] = {}
    for name in matrices:
        rung = rungs[name].rung
        is_own = name not in early and rung in (Rung.OPAQUE, Rung.SMALL)
        names.setdefault(Rung.OWN if is_own else rung, []).append(name)
    return {str(rung): _share_of(own, matrices) for rung, own in names.items()}
