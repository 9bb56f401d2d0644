"""`solve`: a shortest order, or a bound that no order goes below, by OR-tools' CP-SAT (`pip install ortools`).

The solver counts in ticks (`ticks`) under the constraints of `exact_model`. It uses one thread, so that equal problems
find the same where the time is enough.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from penstock.searching.exact_model import Model, timed
from penstock.searching.problem import Ints, Problem
from penstock.searching.sequences import run
from penstock.searching.ticks import Ticks

MOST_ACTIONS = 400
"""Of a problem for which a proof can be had in some seconds."""
LOOKS_AGAIN_S = 0.05
"""For Ctrl-C, while the solver runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """What the solver came to."""

    sequence: Ints | None
    """The best one that it found, which fits; None where it found none."""
    bound_s: float
    """No order goes below it; infinite where no order fits."""
    is_proved: bool
    """Whether, in ticks, no order is better than the sequence, or none fits."""
    was_interrupted: bool = False
    """Whether Ctrl-C ended it before its time."""


def is_installed() -> bool:
    """Whether OR-tools is there."""
    return find_spec("ortools") is not None


def solve(problem: Problem, start: Ints | None, *, by_span: bool, seconds: float, seed: int = 0) -> Exact:
    """Look for a sequence of least makespan, or span, for so many seconds.

    `start` is a sequence from which to begin. Ctrl-C ends the search; the best so far is returned.
    """
    from ortools.sat.python import cp_model

    begin_s = time.perf_counter()
    ticks = Ticks.of(problem)
    model = _model(ticks, start, by_span=by_span)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    # Linear programs take longer than what they prove is worth, and with fine ticks may never end.
    solver.parameters.linearization_level = 0
    # The solver's own handler swallows Ctrl-C, and takes Python's away.
    solver.parameters.catch_sigint_signal = False
    solver.parameters.max_time_in_seconds = max(seconds - (time.perf_counter() - begin_s), 0.0)
    status, was_interrupted = _run(solver, model)
    assert status != cp_model.MODEL_INVALID, model.constraints.validate()
    if status == cp_model.INFEASIBLE:
        return Exact(None, math.inf, True, was_interrupted)
    sequence = model.sequence(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    if sequence is not None and not run(problem, sequence).fits(problem):
        sequence = None  # of actions that take no ticks, it has to guess the order
    # A bound is a whole number; the solver returns it in floating point.
    bound = max(math.floor(solver.best_objective_bound + 0.5), 0)
    return Exact(sequence, ticks.bound_s(bound, by_span=by_span), status == cp_model.OPTIMAL, was_interrupted)


def _model(ticks: Ticks, start: Ints | None, *, by_span: bool) -> Model:
    """Return the constraints, with a start as a hint, and as what is not to be exceeded if it fits."""
    if start is None:
        return Model(ticks.problem, ticks.total, by_span=by_span, lost=ticks.lost_by_times)
    timing = timed(ticks.problem, start)
    fits = bool((timing.peak <= ticks.problem.limit).all())
    objective = int(timing.span_s[0] if by_span else timing.makespan_s[0])
    # Of two orders, that with the shorter span may have the longer makespan.
    model = Model(
        ticks.problem, objective if fits and not by_span else ticks.total, by_span=by_span, lost=ticks.lost_by_times
    )
    if fits:
        model.at_most(objective)
    model.hint(start)
    return model


def _run(solver: Any, model: Model) -> tuple[Any, bool]:
    """Return the solver's status, and whether Ctrl-C ended it: it runs in a thread, for which Python can wait."""
    was_interrupted = False
    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solver.solve, model.constraints)
        while not solving.done():
            try:
                wait([solving], LOOKS_AGAIN_S)
            except KeyboardInterrupt:
                was_interrupted = True
            if was_interrupted:
                solver.stop_search()  # which does nothing before the solver has begun
        return solving.result(), was_interrupted
