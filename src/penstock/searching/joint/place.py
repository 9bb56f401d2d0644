"""`Place`: one placement of a joint search, and what has been found on it."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.lowering import lower
from penstock.partition.balance import balance
from penstock.proofs import Limit
from penstock.searching.candidates import Candidate, families_of
from penstock.searching.fitting import Split, fitting_split
from penstock.searching.joint.annealing import STUCK_S, Annealing, Choice, Row, row_of
from penstock.searching.joint.splits import Splits
from penstock.searching.listing import list_schedule
from penstock.searching.problem import Problem
from penstock.searching.question import Question
from penstock.searching.sequences import sequence_of
from penstock.searching.settings import ANY_NUMBER
from penstock.searching.split_orders import one_at_a_time
from penstock.searching.starting import excess_bytes

FIRST_TRIAL_S = 2e-4
"""The seconds of a trial before one was timed."""
WAIT = 2
"""The wait of W with which annealing begins, by its number."""


@dataclass(eq=False)
class Place:
    """A placement with its candidates."""

    splits: Splits
    limit: Limit | None
    seed: int
    may_recompute: bool
    best: Choice | None = None
    """The best choice so far, by its cost."""
    trial_s: float = FIRST_TRIAL_S
    """The seconds of a trial, as the last run took."""
    split_of_problem: dict[int, tuple[Problem, Split]] = field(default_factory=dict)
    """The split of each problem of a candidate, by the problem's id."""

    @property
    def best_s(self) -> float:
        """The cost of the best choice; infinite where there is none."""
        return math.inf if self.best is None else self.best.cost_s

    @cached_property
    def annealing(self) -> Annealing:
        return Annealing(self.splits, seed=self.seed, may_recompute=self.may_recompute)

    @cached_property
    def balanced(self) -> Split:
        """The split whose heaviest stage is as light as it can be."""
        weights = self.splits.layer_costs.seconds_of_layers.sum(axis=0).tolist()
        return balance(weights, self.splits.placement.num_stages)

    def rows(self) -> list[Row]:
        """Return the choices with which annealing begins: balanced, as far ahead as memory allows or as under 1F1B."""
        placement, num_ranks = self.splits.placement, self.splits.placement.num_ranks
        stages = tuple(range(placement.num_stages))
        per_rank = placement.num_stages // num_ranks
        under_1f1b = (num_ranks - np.array(placement.rank_of_stage, np.int64)) * per_rank
        numbers = [np.full(len(stages), ANY_NUMBER, np.int64), under_1f1b]
        return [
            row_of(self.balanced, recomputed, num_ranks, under_way, wait=WAIT)
            for recomputed in ([(), stages] if self.may_recompute else [()])
            for under_way in numbers
        ]

    def anneal(self, row: Row, num_trials: int, temperature_s: float) -> Candidate | None:
        """Anneal from a choice, and return the order of the best one; None where it does not fit.

        Where its messages break the limit, later runs leave room for them.
        """
        begin_s = time.perf_counter()
        choice = self.annealing.run(row, num_trials, temperature_s)
        self.trial_s = (time.perf_counter() - begin_s) / num_trials
        if self.best is None or choice.cost_s < self.best.cost_s:
            self.best = choice
        if choice.cost_s >= STUCK_S:
            self._give_back_room()
            return None
        problem = self._problem(choice.split, choice.recomputed)
        sequence = list_schedule(problem, choice.setting)
        if sequence is None:
            return None
        candidate = Candidate.of(problem, sequence, "list", by_span=False, setting=choice.setting)
        missing_bytes = excess_bytes(candidate, self.question_of(problem))
        if missing_bytes.any():
            self.annealing.most_bytes -= missing_bytes
            self.best = None  # it was found with room that messages need
            return None
        return candidate if candidate.fits else None

    def _give_back_room(self) -> None:
        """Give back half of what was taken off the limit for messages, which may have been more than others need."""
        most_bytes = self.splits.most_bytes
        if most_bytes is not None:
            self.annealing.most_bytes += (most_bytes - self.annealing.most_bytes) // 2

    def families(self, split: Split) -> Iterator[Candidate]:
        """Yield every family of the placement with a split, whether it fits or not."""
        problem = self._problem(split)
        for schedule in families_of([self.splits.placement], self.splits.num_microbatches):
            yield Candidate.of(problem, sequence_of(schedule), "family", by_span=False, family=schedule)

    def resplit(self, family: Candidate) -> Candidate | None:
        """Return a family with another split, in which it fits with its messages; None where none was found."""
        costs, most_bytes = self.splits.layer_costs, self.splits.most_bytes
        assert family.family is not None
        assert most_bytes is not None
        split = fitting_split(costs, lower(family.family), most_bytes, costs.shards).split
        if split is None:
            return None
        return Candidate.of(self._problem(split), family.sequence, "family", by_span=False, family=family.family)

    def known_orders(self, split: Split) -> list[Candidate]:
        """Return the families with a split, and one microbatch at a time, which needs least memory."""
        problem, alone = self._problem(split), one_at_a_time(self.splits.placement, self.splits.num_microbatches)
        slowest = Candidate.of(problem, sequence_of(alone), "list", by_span=False)
        return [*self.families(split), slowest]

    def question_of(self, problem: Problem) -> Question:
        """Return the question of one split: its costs, and the limit."""
        return Question(self.splits.costs_of(self.split_of_problem[id(problem)][1]), False, self.limit, None, self.seed)

    def _problem(self, split: Split, recomputed: tuple[int, ...] = ()) -> Problem:
        problem = self.splits.problem_of(split, recomputed, most_bytes=self.annealing.most_bytes)
        self.split_of_problem[id(problem)] = problem, split
        return problem
