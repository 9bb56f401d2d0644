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
"""The most actions of a problem for which a proof can be had in some seconds."""
LOOKS_AGAIN_S = 0.05
"""The seconds between two looks for Ctrl-C while the solver runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The solver's result."""

    sequence: Ints | None
    """The best sequence that the solver found, which fits; None where it found none."""
    bound_s: float
    """The seconds that no order goes below; infinite where no order fits."""
    is_proved: bool
    """Whether the sequence is at the bound, both in ticks; or no order fits."""
    was_interrupted: bool = False
    """Whether Ctrl-C ended it before its time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Instance:
    """A problem as `solve` gets it, and in ticks."""

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


def solve(problem: Problem, start: Ints | None, *, by_span: bool, seconds: float, seed: int = 0) -> Solution:
    """Look for a sequence of least makespan, or span, for so many seconds.

    `start` is a sequence from which to begin. Ctrl-C ends the search; the best so far is returned. Before the solver
    runs, Ctrl-C is raised.
    """
    end_s = time.perf_counter() + seconds
    instance = _Instance(problem, Ticks.of(problem), by_span, seed)
    if not by_span:
        return _attempt(instance, start, end_s)
    # The best order is most often one in which all ranks begin as soon as they can. The bound is one of all orders.
    prompt = _attempt(instance, start, end_s - seconds / 2, is_prompt=True)
    if prompt.was_interrupted:
        return replace(prompt, bound_s=0.0, is_proved=False)
    solution = _attempt(instance, start if prompt.sequence is None else prompt.sequence, end_s)
    if solution.is_proved or prompt.sequence is None:
        return solution
    return replace(solution, sequence=prompt.sequence)


def _attempt(instance: _Instance, start: Ints | None, end_s: float, *, is_prompt: bool = False) -> Solution:
    """Run OR-tools' CP-SAT on a problem until `end_s` (of `time.perf_counter`); return the best order and the bound.

    The problem is in ticks, whole numbers of a small part of a second. `start` is an order to begin from. With
    `is_prompt` ranks begin only as soon as they can: a smaller problem, whose bound does not hold for all orders.
    """
    from ortools.sat.python import cp_model

    start_objective = instance.objective(start)
    model = _model(instance, start, start_objective, is_prompt=is_prompt)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = instance.seed
    # Presolve of 9.15.6755 calls 1 in 100 of these models infeasible that are feasible (or-tools#5274), and saves no
    # time.
    solver.parameters.cp_model_presolve = False
    # Linear programs take longer than what they prove is worth, and with fine ticks may never end.
    solver.parameters.linearization_level = 0
    # The solver's own handler swallows Ctrl-C, and takes Python's away.
    solver.parameters.catch_sigint_signal = False
    solver.parameters.max_time_in_seconds = max(end_s - time.perf_counter(), 0.0)
    status, was_interrupted = _run(solver, model)
    assert status != cp_model.MODEL_INVALID, model.constraints.validate()
    if status == cp_model.INFEASIBLE and start_objective is None:
        return Solution(None, math.inf, not is_prompt, was_interrupted)
    # Read the order, and measure it again by the simulation's own rules.
    sequence = model.sequence(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    objective = instance.objective(sequence)
    # A bound is a whole number; the solver returns it in floating point.
    bound = max(math.floor(solver.best_objective_bound + 0.5), 0)
    if status == cp_model.INFEASIBLE or (start_objective is not None and start_objective < bound and not is_prompt):
        bound = 0  # the start is an order that the solver excludes, so its bound is wrong
    is_proved = objective is not None and objective <= bound
    bound_s = instance.ticks.bound_s(bound, by_span=instance.by_span)
    return Solution(None if objective is None else sequence, bound_s, is_proved, was_interrupted)


def _model(instance: _Instance, start: Ints | None, start_objective: int | None, *, is_prompt: bool) -> Model:
    """Return the constraints; a start is a hint, and its objective, if it fits, is not to be exceeded."""
    ticks, by_span = instance.ticks, instance.by_span
    # Of two orders, that with the shorter span may have the longer makespan.
    horizon = ticks.total if by_span or start_objective is None else start_objective
    model = Model(ticks.problem, horizon, by_span=by_span, is_prompt=is_prompt, lost=ticks.lost_by_times)
    if start is not None:
        model.hint(start)
    if start_objective is not None and not is_prompt:  # a start need not be prompt
        model.at_most(start_objective)
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
