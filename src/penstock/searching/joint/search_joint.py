"""`search_joint`: the layers of each stage, the stages that recompute, the placement and the order, together.

start     every family of every placement, with layers balanced by their seconds, or so that it fits
anneal    split, recomputation and settings of list schedules change at random (`annealing`): a little on each
          placement, then on the best of them in turns; later runs leave room for the messages of earlier ones
move      actions of the best few orders (`improving`)
end       the best ones are lowered, proved under the limit and simulated with their messages (`ending`)
certify   nothing that is known contradicts the result, nor its bound for any split (`bounds.whole_layers`)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.errors import ConfigError, ScheduleError, count_of, described, require_choice
from penstock.ir.units import format_bytes
from penstock.placement import Placement
from penstock.proofs import Limit
from penstock.searching.bounds import Bound
from penstock.searching.bounds.whole_layers import whole_layer_bound
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective
from penstock.searching.certifying import certify
from penstock.searching.ending import Finalist, finalists_of, shortest
from penstock.searching.improving import Improvement
from penstock.searching.joint.annealing import Row
from penstock.searching.joint.place import Place
from penstock.searching.joint.splits import Splits
from penstock.searching.moves import Moves
from penstock.searching.question import ANY, PLACEMENTS, require_number
from penstock.searching.question import place as place_stages
from penstock.searching.result import OPTIMAL_GAP, Progress, SearchResult
from penstock.searching.sequences import run
from penstock.searching.split_orders import split_within
from penstock.simulation.costs.layer_costs import LayerCosts

STAGES_PER_RANK = (1, 2, 3, 4)
"""The numbers of stages of a rank that are tried where none is asked for."""
SHARE_OF_ANNEALING = 0.75
"""The share of the budget after which only actions move."""
SHARE_OF_FIRST_RUNS = 0.15
"""The share of the budget for the first runs on all placements, each from every start."""
MOST_FIRST_TRIALS = 600
NUM_RUNS = 8
"""How many long runs the rest of the annealing is cut into."""
NUM_BEST = 3
"""How many placements get long runs."""
TEMPERATURES = (0.01, 0.004, 0.01, 0.002)
"""The temperatures at which long runs begin, in turns, as shares of the bound."""
NUM_MOVED = 4
"""How many orders are improved by moves."""
MOST_FINALISTS = 8
NUM_FAMILIES = 4
"""How many families are among the finalists."""


def search_joint(
    layer_costs: LayerCosts,
    ranks: int,
    microbatches: int,
    *,
    placement: str = ANY,
    stages_per_rank: int | None = None,
    memory_limit: Any = None,
    recompute: bool = True,
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Search for the layers of each stage and the order of F, I and W that take least time under a limit of memory.

    `placement`: line, loop, v, wave, or any of these, with 1 to 4 stages on each rank, or as many as `stages_per_rank`
    says. `memory_limit` is bytes, as for `penstock.check`; it holds for the lowered program, with its messages. Under a
    limit stages may `recompute`: their forwards keep their inputs, and run again. The search ends after so many
    `seconds`, without compiling on first use, or after so many `evaluations`: then equal seeds find the same to the
    bit. Ctrl-C ends it; the best so far is returned.

    The result's `bound` holds for every split of whole layers, placement, order and recomputation.

    Raises:
        ConfigError: for a value that an argument cannot have, costs that are not per layer, fewer layers than ranks.
        ScheduleError: a layer alone is above the limit, or no order was found that fits; it says what would.
        AssertionError: where the result contradicts its bound or a registered family: a bug.
    """
    limit = _require_values(layer_costs, memory_limit, seconds, ranks, microbatches, evaluations)
    costs = _of_ranks(layer_costs, ranks)
    bound = whole_layer_bound(costs, ranks, microbatches, limit)
    most_bytes = None if limit is None else limit.of_ranks(ranks, Placement.line(ranks).stages_per_rank)
    if most_bytes is not None:
        _require_room(costs, int(most_bytes.max()))
    placements = _placements(placement, ranks, costs.num_layers, stages_per_rank)
    may_recompute = recompute and limit is not None
    places = [
        Place(Splits(costs, each, microbatches, most_bytes), limit, seed + index, may_recompute)
        for index, each in enumerate(placements)
    ]
    _compile(places[0])
    search = _JointSearch(places, bound, Budget(seconds, evaluations), progress)
    result = search.run()
    certify(result, {result.placement: replace(costs, split=result.split)}, memory_limit, per_action=False)
    return result


def _require_values(
    costs: object, memory_limit: Any, seconds: object, ranks: object, microbatches: object, evaluations: object
) -> Limit | None:
    """Refuse a value that an argument cannot have; return the limit. Raises: ConfigError."""
    if not isinstance(costs, LayerCosts):
        problem = f"{described(costs)}; expected LayerCosts, with entries per layer, since the layers are to be split"
        raise ConfigError(f"{problem}; penstock profile measures them", key="layer_costs")
    require_number("ranks", ranks, at_least=1)
    require_number("microbatches", microbatches, at_least=1)
    if evaluations is not None:
        require_number("evaluations", evaluations, at_least=1)
    require_number("seconds", seconds, at_least=0, is_whole=False)
    if memory_limit is None:
        return None
    limit = Limit.read(memory_limit)
    if not limit.in_bytes:
        problem = f"{limit} does not say how large a layer may be, and stages have any layers here"
        raise ConfigError(f'{problem}; give bytes, such as "40GiB"', key="memory_limit")
    limit.require_sizes(costs.activation_bytes)
    return limit


def _of_ranks(costs: LayerCosts, ranks: int) -> LayerCosts:
    """Return the costs without channels of ranks that there are not, and without the split that was measured."""
    channels = tuple(channel for channel in costs.channels if max(channel.sender, channel.receiver) < ranks)
    return replace(costs, channels=channels, split=())


def _require_room(costs: LayerCosts, most_bytes: int) -> None:
    """Refuse costs of which a layer alone is larger than a rank may be. Raises: ScheduleError."""
    per_layer = costs.of_stages([1] * costs.num_layers)
    sizes = per_layer.stage_bytes(Placement.line(costs.num_layers), 1)
    workspace = np.maximum(sizes.forward_workspace, sizes.backward_workspace)
    least_bytes = sizes.static + sizes.activation + workspace
    layer = int(least_bytes.argmax())
    if least_bytes[layer] > most_bytes:
        parts = (sizes.static, sizes.activation + workspace)
        always, of_microbatch = (format_bytes(int(size[layer])) for size in parts)
        raise ScheduleError(
            f"layer {layer} alone needs {format_bytes(int(least_bytes[layer]))}: {always} of parameters, gradients and "
            f"optimizer state, and {of_microbatch} that one microbatch takes; a rank may hold "
            f"{format_bytes(most_bytes)}. Raise the limit, make microbatches smaller, or cut the layer"
        )


def _placements(name: str, ranks: int, num_layers: int, stages_per_rank: int | None) -> list[Placement]:
    """Return the placements of a name that have no more stages than there are layers. Raises: ConfigError."""
    require_choice("placement", name, (*PLACEMENTS, ANY))
    if stages_per_rank is not None:
        require_number("stages_per_rank", stages_per_rank, at_least=1)
        if ranks * stages_per_rank > num_layers:
            problem = f"{stages_per_rank}; {count_of(ranks * stages_per_rank, 'stage')} need as many layers"
            raise ConfigError(f"{problem}, and the costs have {num_layers}; give fewer", key="stages_per_rank")
    refusals: list[ConfigError] = []
    placements: dict[Placement, None] = {}
    for style in PLACEMENTS if name == ANY else (name,):
        for per_rank in STAGES_PER_RANK if stages_per_rank is None else (stages_per_rank,):
            if ranks * per_rank > num_layers:
                continue
            try:
                placements[place_stages(style, ranks, ranks * per_rank)] = None
            except ConfigError as error:
                refusals.append(error)
    if not placements:
        if refusals:
            raise refusals[0]
        problem = f"{name}; it takes two stages a rank or more, and there are {num_layers} layers for {ranks} ranks"
        raise ConfigError(f"{problem}; use line, or fewer ranks", key="placement")
    return list(placements)


def _compile(first: Place) -> None:
    """Compile all loops, which takes seconds on first use."""
    first.annealing.run(first.rows()[0], 1, 0.0)
    candidate = next(first.families(first.balanced), None)
    if candidate is not None:
        Moves(candidate.problem, 0).improve(candidate.sequence, candidate.sequence, math.inf, 1, 0.0)


class _JointSearch:
    """The search of several placements with one budget."""

    def __init__(
        self, places: Sequence[Place], bound: Bound, budget: Budget, progress: Callable[[Progress], None] | None
    ) -> None:
        self._places, self._bound, self._budget, self._progress = places, bound, budget, progress
        self._families: list[tuple[Place, Candidate]] = []
        self._searched: list[tuple[Place, Candidate]] = []
        self._best_s = math.inf

    def run(self) -> SearchResult:
        """Return the best that fits. Raises: ScheduleError, or KeyboardInterrupt before anything fits."""
        self._budget.begin()
        was_interrupted = False
        try:
            self._start()
            self._anneal()
            self._move()
        except KeyboardInterrupt:
            was_interrupted = True
        place, finalist = self._finalist(was_interrupted=was_interrupted)
        _, split = place.split_of_problem[id(finalist.candidate.problem)]
        return SearchResult(
            plan=finalist.plan,
            costs=place.splits.costs_of(split),
            bound=self._bound,
            method=finalist.candidate.method,
            objective="makespan",
            seconds=self._budget.elapsed_s,
            evaluations=self._budget.spent,
            was_interrupted=was_interrupted,
            split=split,
        )

    @property
    def _goal_s(self) -> float:
        return self._bound.seconds * (1 + OPTIMAL_GAP)

    def _is_over(self, share: float) -> bool:
        return self._best_s <= self._goal_s or self._budget.is_over_at(share)

    def _report(self, objective_s: float) -> None:
        self._best_s = min(self._best_s, objective_s)
        if self._progress is not None:
            self._progress(Progress(self._budget.elapsed_s, self._best_s, self._bound.seconds))

    def _start(self) -> None:
        """Time the families of every placement with the balanced split."""
        for place in self._places:
            families = list(place.families(place.balanced))
            self._families += [(place, family) for family in families]
            self._budget.spent += len(families)
            self._report(min(map(by_objective, families), default=math.inf))

    def _anneal(self) -> None:
        """Anneal a little on every placement, then in long runs on the best ones, from new starts and from the best."""
        starts = [(place, row) for place in self._places for row in place.rows()]
        for place, row in starts:
            num_trials = self._budget.trials(SHARE_OF_FIRST_RUNS / len(starts), place.trial_s)
            self._run(place, row, min(num_trials, MOST_FIRST_TRIALS), TEMPERATURES[0])
            if self._is_over(SHARE_OF_ANNEALING):
                return
        turn = 0
        while not self._is_over(SHARE_OF_ANNEALING):
            best_places = sorted(self._places, key=lambda place: place.best_s)[:NUM_BEST]
            place = best_places[turn // 2 % len(best_places)]
            rows = place.rows()
            row = place.best.row if place.best is not None and turn % 2 else rows[turn // 2 % len(rows)]
            num_trials = self._budget.trials(SHARE_OF_ANNEALING / NUM_RUNS, place.trial_s)
            self._run(place, row, num_trials, TEMPERATURES[turn % len(TEMPERATURES)])
            turn += 1

    def _run(self, place: Place, row: Row, num_trials: int, temperature: float) -> None:
        num_trials = max(num_trials, 1)
        candidate = place.anneal(row, num_trials, temperature * self._bound.seconds)
        self._budget.spent += num_trials
        if candidate is not None:
            self._searched.append((place, candidate))
            self._report(candidate.objective_s)

    def _move(self) -> None:
        """Move actions of the best few orders, in what is left of the budget."""
        if not self._searched:
            return
        place_of_problem = {id(candidate.problem): place for place, candidate in self._searched}
        candidates = sorted((candidate for _, candidate in self._searched), key=by_objective)[:NUM_MOVED]
        question = place_of_problem[id(candidates[0].problem)].question_of(candidates[0].problem)
        improvement = Improvement(question, self._budget, self._goal_s, 1.0, self._report)
        try:
            improvement.run([replace(candidate, setting=None) for candidate in candidates])
        finally:  # what was improved before an interrupt counts
            self._searched += [(place_of_problem[id(moved.problem)], moved) for moved in improvement.improved]

    def _finalist(self, *, was_interrupted: bool) -> tuple[Place, Finalist]:
        """Return the best candidate that fits with its messages, and its placement.

        The families with its split are looked at too: no family of the result's own split may be shorter.
        """
        self._resplit_families()
        families = sorted(self._families, key=lambda pair: pair[1].objective_s)[:NUM_FAMILIES]
        searched = sorted(self._searched, key=lambda pair: pair[1].objective_s)[:MOST_FINALISTS]
        finalists = self._finalists([*searched, *families])
        if not finalists and was_interrupted:
            raise KeyboardInterrupt
        if not finalists:
            finalists = self._finalists(self._last_resort())
        place, best = _shortest(finalists)
        _, split = place.split_of_problem[id(best.candidate.problem)]
        same_split = [(place, family) for family in place.families(split)]
        return _shortest([(place, best), *self._finalists(same_split)])

    def _resplit_families(self) -> None:
        """Give families that do not fit another split, where with the balanced one they would be the shortest."""
        for place, family in self._families if self._places[0].limit is not None else ():
            if family.fits or run(family.problem, family.sequence).makespan_s >= self._best_s:
                continue
            candidate = place.resplit(family)
            if candidate is not None:
                self._searched.append((place, candidate))

    def _finalists(self, candidates: Sequence[tuple[Place, Candidate]]) -> list[tuple[Place, Finalist]]:
        """Lower, prove and simulate candidates; leave out what breaks the limit."""
        finalists = []
        for place, candidate in candidates:
            question = place.question_of(candidate.problem)
            found = finalists_of([candidate], question.costs, question.memory_limit, by_span=False)
            finalists += [(place, finalist) for finalist in found]
        return finalists

    def _last_resort(self) -> list[tuple[Place, Candidate]]:
        """Return known orders, one of which fits. Raises: ScheduleError: none does; it names what needs least."""
        first = self._places[0].splits
        limit = self._places[0].limit
        assert limit is not None, "without a limit, every order fits"
        placements = [place.splits.placement for place in self._places]
        placement, split = split_within(first.layer_costs, placements, first.num_microbatches, limit)
        place = next(place for place in self._places if place.splits.placement == placement)
        return [(place, order) for order in place.known_orders(split)]


def _shortest(finalists: Sequence[tuple[Place, Finalist]]) -> tuple[Place, Finalist]:
    """Return the shortest finalist with its placement, of equally short ones the one that holds least."""
    best = shortest([finalist for _, finalist in finalists])
    return next((place, finalist) for place, finalist in finalists if finalist is best)
