"""Improvement of the best few candidates: first other settings (`varying`), then moves of actions (`moves`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.searching.asked import Asked
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective
from penstock.searching.moves import Moves
from penstock.searching.starting import NUM_KEPT
from penstock.searching.varying import Variation

NUM_STARTS = 4
"""From which it begins, in turns."""
SHARE_OF_VARIATION = 0.4
"""Of the time, at most."""
MOST_VAIN = 200
"""Variations in a row that bring nothing, at which they end."""
NUM_ROUNDS = 12
"""In which a run of moves cools down."""
TEMPERATURES = (0.002, 0.0005, 0.0001, 0.01, 0.001)
"""At which runs of moves begin, in turns: shares of the objective."""
COOLING = 0.6
"""The share of a temperature that is left after a round."""


@dataclass(slots=True, eq=False)
class Improvement:
    """Improves candidates until a share of the budget is over, or one is as short as can be."""

    asked: Asked
    budget: Budget
    goal_s: float
    share: float
    report: Callable[[float], None]
    found: list[Candidate] = field(default_factory=list)
    """The sequences that are shorter than those they were made from."""

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Improve the best few of the candidates."""
        if not candidates:
            return
        best = min(candidates, key=by_objective)
        varied = self._vary([each for each in candidates if each.setting is not None], best)
        self._move([*varied, *(each for each in candidates if each.setting is None)])

    def _is_over(self, best: Candidate, share: float) -> bool:
        return best.objective_s <= self.goal_s or self.budget.is_over_at(share)

    def _vary(self, candidates: Sequence[Candidate], best: Candidate) -> list[Candidate]:
        """Vary the settings of list schedules, until that brings nothing more; return what each start has become.

        `best` is that of all candidates: where it is as short as can be, nothing is tried.
        """
        starts = sorted(candidates, key=by_objective)[:NUM_STARTS]
        if not starts:
            return starts
        variation = Variation(starts, self.asked.seed, by_span=self.asked.by_span)
        num_vain, found = 0, []
        while num_vain < MOST_VAIN and not self._is_over(best, SHARE_OF_VARIATION * self.share):
            varied = variation.step()
            self.budget.spent += 1
            num_vain += 1
            if varied is not None:
                found.append(varied)
                best, num_vain = min(best, varied, key=by_objective), 0
                self.report(best.objective_s)
        self.found += sorted(found, key=by_objective)[:NUM_KEPT]
        return variation.pool

    def _move(self, candidates: Sequence[Candidate]) -> None:
        """Move actions of the best few in turns."""
        starts = sorted(candidates, key=by_objective)[:NUM_STARTS]
        seed, by_span = self.asked.seed, self.asked.by_span
        moves = {id(each.problem): Moves(each.problem, seed, by_span=by_span) for each in starts}
        best, turn = starts[0], 0
        while not self._is_over(best, self.share):
            start = best if turn % 2 else starts[turn // 2 % len(starts)]
            turn += 1
            of_run = self._cool_down(moves[id(start.problem)], start, TEMPERATURES[turn % len(TEMPERATURES)])
            if of_run.objective_s < start.objective_s:
                self.found.append(of_run)
            best = min(best, of_run, key=by_objective)

    def _cool_down(self, moves: Moves, start: Candidate, temperature: float) -> Candidate:
        sequence, best, best_s = start.sequence, start.sequence, start.objective_s
        temperature_s = temperature * best_s
        for _ in range(NUM_ROUNDS):
            num_moves = self.budget.next_moves()
            if self.budget.is_over_at(self.share) or not num_moves:
                break
            improved = moves.improve(sequence, best, best_s, num_moves, temperature_s)
            sequence, best = improved.sequence, improved.best
            best_s = float(improved.best_s[0])
            temperature_s *= COOLING
            self.budget.spent += num_moves
            self.report(best_s)
        return Candidate(start.problem, best, best_s, "improved" if best_s < start.objective_s else start.method)
