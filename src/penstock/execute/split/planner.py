"""`SplitPlanner`: makes the plans by which a stage's backwards are split, and says why a weight does not wait.

Weights that cannot wait have one of three reasons. The log, `describe_split` and `penstock doctor` say them; how the
others wait is in the log at DEBUG. If much does not wait, a warning says so once.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from operator import is_

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import listed, warn
from penstock.execute.split.deferred_weights import DeferredWeights
from penstock.execute.split.graph_search import Survey, search
from penstock.execute.split.plan import Shown, SplitPlan, plan_from
from penstock.ir.measured import ImmediateWeights

_LOG = logging.getLogger("penstock")
SMALL = 2**21
"""Multiplications in a weight's gradient below which it is not deferred: `bench/split_backward.py --border` shows that
to defer it then takes longer than to compute it."""
LARGE_SHARE = 0.1
"""Share of a stage's weights above which a warning says that they do not wait."""
_GROWTH = 2
"""How much larger a batch must be than the one that showed the sizes, for them to be looked at again."""


class Reason(StrEnum):
    """Why the gradient of a weight does not wait for W."""

    SMALL = "small"
    """To compute it at once takes less time than to keep it for later."""
    NOT_TOLD_APART = "cannot be told apart"
    """Nothing tells the input's gradient from that of the weight, I uses the weight in another way as well, or its
    gradients would be added up in another order."""
    OWN = "its layer computes it"
    """No gradient came to it in I, and nothing that waits was found: its layer leaves it for later, or has none."""


class SplitPlanner:
    """Plans how the backwards of some layers are split, step by step."""

    def __init__(self, small: float = SMALL) -> None:
        """`small` is how many multiplications a weight's gradient must take to be deferred."""
        self.plan = SplitPlan()
        """The plan of the latest step."""
        self.is_examined = False
        """Whether it is known which weights do not wait."""
        self.immediate: ImmediateWeights | None = None
        """The weights that do not wait; None where they are not known."""
        self._border = small
        self._shown = Shown()
        self._trained_params: list[nn.Parameter] = []
        self._num_elements = 0
        self._is_new_step = self._is_first_walk = True
        self._mechanisms: dict[int, str] = {}
        """How a weight's gradient waits in the latest step, by the weight's id."""

    def begin_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the next forward make a new plan if there is a reason; `parameters` are those that are held now."""
        trained_params = [parameter for parameter in parameters if parameter.requires_grad]
        if len(trained_params) != len(self._trained_params) or not all(map(is_, trained_params, self._trained_params)):
            self._trained_params = trained_params
            self._shown.forget_others(map(id, parameters))
        self._is_new_step = True

    def start(self, num_elements: int) -> DeferredWeights:
        """Return what the forward that comes next will leave for later; the size is that of the stage's inputs."""
        if self._is_new_step:
            if num_elements > _GROWTH * self._num_elements:
                self._num_elements, self._shown.sizes, self._shown.is_measured = num_elements, {}, False
            self._is_first_walk = True
            self.plan = self._following()
            self._is_new_step = False
        walk_graph = self._survey if self.plan.searches else None
        if walk_graph is None:
            self._mechanisms = {}
        return DeferredWeights(walk_graph)

    @property
    def is_settled(self) -> bool:
        """Whether the next step will split what this one does."""
        next_plan = self._following()
        return (next_plan.asking, next_plan.small) == (self.plan.asking, self.plan.small)

    def is_small(self, weight: Tensor) -> bool:
        """Whether a weight is too small for its gradient to be deferred: names the reason, `plan_from` decides."""
        return self._shown.sizes.get(id(weight), self._border) < self._border

    def mechanisms(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
        """Return how each weight's gradient waits, by name, for those that wait."""
        return {name: self._mechanisms[id(weight)] for name, weight in parameters if id(weight) in self._mechanisms}

    @contextmanager
    def examining(self, stage: int, parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """Look which weights get their gradients in a backward of inputs, and say it once the plan is settled."""
        # Vectors, such as biases and norms, are left out: their gradients stay in I by design.
        matrices = {name: weight for name, weight in parameters if weight.requires_grad and weight.dim() > 1}
        immediate: set[str] = set()

        def note(name: str, gradient: Tensor | None) -> None:
            if gradient is not None:  # as of a layer that computes its weight gradients later by itself
                immediate.add(name)

        hooks = [weight.register_hook(partial(note, name)) for name, weight in matrices.items()]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self.is_settled:
            self.is_examined = True
            self.immediate = self._immediate_weights(immediate, matrices)
            _report(stage, self.immediate, self.mechanisms(matrices.items()), matrices)

    def _immediate_weights(self, immediate: Set[str], matrices: Mapping[str, nn.Parameter]) -> ImmediateWeights:
        reasons: dict[str, str] = {}
        for name, weight in matrices.items():
            if name in immediate:
                reasons[name] = Reason.SMALL if self.is_small(weight) else Reason.NOT_TOLD_APART
            elif id(weight) not in self._mechanisms:
                reasons[name] = Reason.OWN
        names = tuple(name for name in matrices if name in immediate)
        return ImmediateWeights(_share_of(immediate, matrices), names, reasons)

    def _following(self) -> SplitPlan:
        return plan_from(self._shown, self._border)

    def _survey(self, edges: Sequence[GradientEdge]) -> Survey:
        plan = self.plan
        survey = search(edges, plan.small, asking_functions=plan.asking, finds_branches=plan.finds_branches)
        if self._is_first_walk:  # a forward may make functions of its own anew: those of earlier steps are forgotten
            self._is_first_walk, self._shown.functions, self._mechanisms = False, set(), {}
        self._shown.add(survey)
        self._mechanisms |= {
            id(parameter): deferred_node.mechanism
            for deferred_node in survey.deferred_nodes
            for parameter in deferred_node.parameters
        }
        return survey


def _report(
    stage: int, immediate: ImmediateWeights, mechanisms: Mapping[str, str], matrices: Mapping[str, nn.Parameter]
) -> None:
    """Log which share of a stage's weights waits, and why others do not; warn if these are many."""
    shares = [f"{reason} {_share_of(names, matrices):.0%}" for reason, names in by_value(immediate.reasons).items()]
    _LOG.info("stage %d: %s", stage, "; ".join([f"{1 - immediate.share:.0%} of its weights wait for W", *shares]))
    for mechanism, names in by_value(mechanisms).items():
        _LOG.debug("stage %d: as %s wait %s", stage, mechanism, listed(names))
    large = [name for name in immediate.names if immediate.reasons[name] != Reason.SMALL]
    share = _share_of(large, matrices)
    if share > LARGE_SHARE:
        warn(
            f"stage {stage}: {share:.0%} of its weights take their gradients in the `I` of a split backward: "
            f"{listed(large)}. They are right, but leave `W` less to do, which a schedule "
            "with split backwards lives on. Expected weights that are the right side of products, convolutions or "
            "tables alone, or custom functions whose backward asks ps.wants_weight_gradient(ctx); or use a schedule "
            "with whole backwards. docs/reference/pipeline.md (Split backwards) says for each layer what can wait"
        )


def by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return which keys have each value."""
    keys_by_value: dict[str, list[str]] = {}
    for key, value in values.items():
        keys_by_value.setdefault(value, []).append(key)
    return keys_by_value


def _share_of(names: Iterable[str], matrices: Mapping[str, nn.Parameter]) -> float:
    num_elements = sum(weight.numel() for weight in matrices.values())
    return sum(matrices[name].numel() for name in names) / num_elements if num_elements else 0.0
