"""Improvement of the best few candidates: first other settings (`varying`), then moves of actions (`moves`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective
from penstock.searching.moves import Moves
from penstock.searching.question import Question
from penstock.searching.starting import MOST_STARTS
from penstock.searching.varying import Variation

NUM_STARTS = 4
"""How many candidates are improved, in turns."""
SHARE_OF_VARIATION = 0.4
"""The largest share of the time that variations of settings get."""
MOST_VAIN = 200
"""How many variations in a row may bring nothing before they end."""
NUM_ROUNDS = 12
"""The rounds in which a run of moves cools down."""
TEMPERATURES = (0.002, 0.0005, 0.0001, 0.01, 0.001)
"""The temperatures at which runs of moves begin, in turns, as shares of the objective."""
COOLING = 0.6
"""The share of a temperature that is left after a round."""


@dataclass(slots=True, eq=False)
class Improvement:
    """Improves candidates until a share of the budget is over, or one is as short as can be."""

    question: Question
    budget: Budget
    goal_s: float
    share: float
    report: Callable[[float], None]
    improved: list[Candidate] = field(default_factory=list)
    """The sequences that are shorter than those they were made from."""

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Improve the best few of the candidates."""
        if not candidates:
            return
        best = min(candidates, key=by_objective)
        varied = self._vary([candidate for candidate in candidates if candidate.setting is not None], best)
        self._move([*varied, *(candidate for candidate in candidates if candidate.setting is None)])

    def _is_over(self, best: Candidate, share: float) -> bool:
        return best.objective_s <= self.goal_s or self.budget.is_over_at(share)

    def _vary(self, candidates: Sequence[Candidate], best: Candidate) -> list[Candidate]:
        """Vary the settings of list schedules, until that brings nothing more; return what each start has become.

        `best` is the best of all candidates: where it is as short as can be, nothing is tried.
        """
        starts = sorted(candidates, key=by_objective)[:NUM_STARTS]
        if not starts:
            return starts
        variation = Variation(starts, self.question.seed, by_span=self.question.by_span)
        num_vain, shorter = 0, []
        while num_vain < MOST_VAIN and not self._is_over(best, SHARE_OF_VARIATION * self.share):
            varied = variation.step()
            self.budget.spent += 1
            num_vain += 1
            if varied is not None:
                shorter.append(varied)
                best, num_vain = min(best, varied, key=by_objective), 0
                self.report(best.objective_s)
        self.improved += sorted(shorter, key=by_objective)[:MOST_STARTS]
        return variation.pool

    def _move(self, candidates: Sequence[Candidate]) -> None:
        """Move actions of the best few in turns."""
        starts = sorted(candidates, key=by_objective)[:NUM_STARTS]
        seed, by_span = self.question.seed, self.question.by_span
        moves = {id(start.problem): Moves(start.problem, seed, by_span=by_span) for start in starts}
        best, turn = starts[0], 0
        while not self._is_over(best, self.share):
            start = best if turn % 2 else starts[turn // 2 % len(starts)]
            turn += 1
            moved = self._cool_down(moves[id(start.problem)], start, TEMPERATURES[turn % len(TEMPERATURES)])
            if moved.objective_s < start.objective_s:
                self.improved.append(moved)
            best = min(best, moved, key=by_objective)

    def _cool_down(self, moves: Moves, start: Candidate, temperature: float) -> Candidate:
        """Return the best sequence of a run of moves from a start, at a temperature that falls."""
        sequence, best, best_s = start.sequence, start.sequence, start.objective_s
        temperature_s = temperature * best_s
        for _ in range(NUM_ROUNDS):
            num_moves = self.budget.next_moves()
            if self.budget.is_over_at(self.share) or not num_moves:
                break
            state = moves.improve(sequence, best, best_s, num_moves, temperature_s)
            sequence, best, best_s = state.sequence, state.best, float(state.best_s[0])
            temperature_s *= COOLING
            self.budget.spent += num_moves
            self.report(best_s)
        return Candidate(start.problem, best, best_s, "improved" if best_s < start.objective_s else start.method)
