"""`solve`: a shortest order, and a bound that no order goes below, by OR-tools' CP-SAT (`pip install ortools`).

The solver counts in ticks (`ticks`) under the constraints of `exact_model`. It uses one thread, so that equal problems
find the same where the time is enough.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from penstock.searching.exact_model import Model
from penstock.searching.problem import Ints, Problem
from penstock.searching.sequences import run
from penstock.searching.ticks import Ticks

MOST_ACTIONS = 400
"""Of a problem for which a proof can be had in some seconds."""
LOOKS_AGAIN_S = 0.05
"""For Ctrl-C, while the solver runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """The solver's result."""

    sequence: Ints | None
    """The best that it found, which fits; None where it found none."""
    bound_s: float
    """No order goes below it; infinite where no order fits."""
    is_proved: bool
    """Whether the sequence is at the bound, both in ticks; or no order fits."""
    was_interrupted: bool = False
    """Whether Ctrl-C ended it before its time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """The arguments of `solve`."""

    problem: Problem
    ticks: Ticks
    by_span: bool
    seed: int

    def objective(self, sequence: Ints | None) -> int | None:
        """Return the ticks of a sequence; None where there is none, or it does not fit."""
        if sequence is None or not run(self.problem, sequence).fits(self.problem):
            return None
        return int(run(self.ticks.problem, sequence).objective_s(by_span=self.by_span))


def is_installed() -> bool:
    """Whether OR-tools is there."""
    return find_spec("ortools") is not None


def solve(problem: Problem, start: Ints | None, *, by_span: bool, seconds: float, seed: int = 0) -> Exact:
    """Look for a sequence of least makespan, or span, for so many seconds.

    `start` is a sequence from which to begin. Ctrl-C ends the search; the best so far is returned. Before the solver
    runs, Ctrl-C is raised.
    """
    end_s = time.perf_counter() + seconds
    asked = _Asked(problem, Ticks.of(problem), by_span, seed)
    if not by_span:
        return _attempt(asked, start, end_s)
    # The best order is most often one in which all ranks begin as soon as they can. The bound is one of all orders.
    prompt = _attempt(asked, start, end_s - seconds / 2, is_prompt=True)
    if prompt.was_interrupted:
        return replace(prompt, bound_s=0.0, is_proved=False)
    every = _attempt(asked, start if prompt.sequence is None else prompt.sequence, end_s)
    return every if every.is_proved or prompt.sequence is None else replace(every, sequence=prompt.sequence)


def _attempt(asked: _Asked, start: Ints | None, end_s: float, *, is_prompt: bool = False) -> Exact:
    from ortools.sat.python import cp_model

    of_start = asked.objective(start)
    model = _model(asked, start, of_start, is_prompt=is_prompt)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = asked.seed
    # Presolve of 9.15.6755 calls 1 in 100 of these models infeasible that are not (or-tools#5274), and saves no time.
    solver.parameters.cp_model_presolve = False
    # Linear programs take longer than what they prove is worth, and with fine ticks may never end.
    solver.parameters.linearization_level = 0
    # The solver's own handler swallows Ctrl-C, and takes Python's away.
    solver.parameters.catch_sigint_signal = False
    solver.parameters.max_time_in_seconds = max(end_s - time.perf_counter(), 0.0)
    status, was_interrupted = _run(solver, model)
    assert status != cp_model.MODEL_INVALID, model.constraints.validate()
    if status == cp_model.INFEASIBLE and of_start is None:
        return Exact(None, math.inf, not is_prompt, was_interrupted)
    sequence = model.sequence(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    objective = asked.objective(sequence)
    # A bound is a whole number; the solver returns it in floating point.
    bound = max(math.floor(solver.best_objective_bound + 0.5), 0)
    if status == cp_model.INFEASIBLE or (of_start is not None and of_start < bound and not is_prompt):
        bound = 0  # the start shows that the solver is wrong
    is_proved = objective is not None and objective <= bound
    bound_s = asked.ticks.bound_s(bound, by_span=asked.by_span)
    return Exact(None if objective is None else sequence, bound_s, is_proved, was_interrupted)


def _model(asked: _Asked, start: Ints | None, of_start: int | None, *, is_prompt: bool) -> Model:
    """Return the constraints, with a start as a hint, and as what is not to be exceeded if it fits."""
    ticks, by_span = asked.ticks, asked.by_span
    # Of two orders, that with the shorter span may have the longer makespan.
    horizon = ticks.total if by_span or of_start is None else of_start
    model = Model(ticks.problem, horizon, by_span=by_span, is_prompt=is_prompt, lost=ticks.lost_by_times)
    if start is not None:
        model.hint(start)
    if of_start is not None and not is_prompt:  # a start need not be prompt
        model.at_most(of_start)
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
