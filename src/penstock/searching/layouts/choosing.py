"""Branch and bound over all layouts, then the search of the best few.

    bound      every layout, in seconds and bytes: those that cannot fit are left out
    evaluate   the layout with the least bound first, by families, until the next bound is above the best few steps
    search     the best few: split and order together, each as long as the others

A layout that is cut off has a bound above the steps of the best few, so it is none of them, whatever is searched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from penstock.searching.layouts.bounds import LayoutBound, bound_of
from penstock.searching.layouts.families import best_of_families, best_of_savers
from penstock.searching.layouts.planned import PlannedLayout
from penstock.searching.layouts.problem import LayoutProblem, LayoutQuestion
from penstock.searching.layouts.refusing import nothing_fits

MOST_SEARCHED = 5
"""The layouts that are searched, and shown."""
WORTH_SHOWING = 1.5
"""The most times the best step that a layout takes which is shown."""
NUM_SURE = 3
"""The best layouts that are the best of all; those behind them are the best of the evaluated ones."""

Evaluate = Callable[[LayoutProblem, float], PlannedLayout | None]
"""Returns a plan of a layout that fits and takes less than so many seconds, or None."""
Search = Callable[[LayoutProblem, PlannedLayout, float], PlannedLayout]
"""Returns a plan of a layout that takes no longer than a given one, searched for so many seconds."""
Tell = Callable[[str], None]
"""Is told what is being done, in a few words."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenLayouts:
    """The best layouts that were planned, and how many there are."""

    layouts: tuple[PlannedLayout, ...]
    """The best first."""
    bound: LayoutBound
    """The least bound of all layouts that may fit."""
    num_layouts: int
    num_may_fit: int
    num_evaluated: int

    @property
    def num_cut_off(self) -> int:
        """Layouts that were not evaluated, since their bounds are above the best steps."""
        return self.num_may_fit - self.num_evaluated


def choose_layouts(
    question: LayoutQuestion,
    *,
    evaluate: Evaluate = best_of_families,
    search: Search | None = None,
    seconds: float = 5.0,
    tell: Tell | None = None,
) -> ChosenLayouts:
    """Return the best layouts of a cluster, each with a plan that fits.

    `search` gets `seconds` for all layouts together. `tell` is told how far it is.

    Raises:
        ConfigError: there is no layout for the numbers that were given, or none that fits; it says what would.
    """
    say = tell or say_nothing
    problems = question.problems()
    bounded = sorted(((bound_of(problem), problem) for problem in problems), key=lambda pair: pair[0])
    fitting = [(bound, problem) for bound, problem in bounded if bound.least_bytes <= problem.limit_bytes]
    plans = _evaluated(fitting, evaluate, say)
    if not plans.best:
        plans = _evaluated(fitting, best_of_savers, say)
    if not plans.best:
        raise nothing_fits(question, problems)
    best = plans.best[:MOST_SEARCHED]
    if search is not None:
        best = _searched(best, search, seconds, say)
    shown = [plan for _, _, plan in best if plan.step_s <= WORTH_SHOWING * best[0][2].step_s]
    return ChosenLayouts(tuple(shown), fitting[0][0], len(problems), len(fitting), plans.num_evaluated)


Bounded = tuple[LayoutBound, LayoutProblem]
Planned = tuple[LayoutBound, LayoutProblem, PlannedLayout]


@dataclass(frozen=True, slots=True)
class _Evaluated:
    best: list[Planned]
    """Plans that fit, the best first."""
    num_evaluated: int


def _evaluated(fitting: Sequence[Bounded], evaluate: Evaluate, say: Tell) -> _Evaluated:
    """Evaluate layouts until the next bound is not below the best few steps; bounds come in ascending order."""
    plans: list[Planned] = []
    num_evaluated = 0
    for bound, problem in fitting:
        steps_s = sorted(plan.step_s for _, _, plan in plans)
        if len(steps_s) >= NUM_SURE and bound.seconds >= steps_s[NUM_SURE - 1]:
            break
        best = f", best {steps_s[0]:.4g} s" if steps_s else ""
        say(f"layout {num_evaluated + 1} of at most {len(fitting)}: {problem.layout}{best}")
        plan = evaluate(problem, steps_s[NUM_SURE - 1] if len(steps_s) >= NUM_SURE else float("inf"))
        num_evaluated += 1
        if plan is not None:
            plans.append((bound, problem, plan))
    return _Evaluated(sorted(plans, key=_by_step), num_evaluated)


def _searched(plans: Sequence[Planned], search: Search, seconds: float, say: Tell) -> list[Planned]:
    """Search layouts one after another; one that can no longer be the best keeps its plan."""
    begin_s, searched = perf_counter(), list(plans)
    for place, (bound, problem, plan) in enumerate(plans):
        best_s = min(known.step_s for _, _, known in searched)
        left_s = seconds - (perf_counter() - begin_s)
        if bound.seconds >= best_s or left_s <= 0:
            continue
        say(f"search {place + 1} of {len(plans)}: {problem.layout}, {plan.step_s:.4g} s by {plan.schedule_name}")
        searched[place] = (bound, problem, search(problem, plan, left_s / (len(plans) - place)))
    return sorted(searched, key=_by_step)


def _by_step(planned: Planned) -> float:
    return planned[2].step_s


def say_nothing(text: str) -> None:
    """Tell nobody."""
