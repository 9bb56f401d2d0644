"""`Candidate`: a sequence with what it comes to; those with which a search starts, and which of several differ."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules import FAMILIES, build
from penstock.searching.listing import Setting, list_schedule
from penstock.searching.problem import Ints, Problem
from penstock.searching.sequences import run, sequence_of
from penstock.searching.settings import settings_for
from penstock.searching.sweeps import sequences_of_sweeps

Method = Literal["family", "list", "improved", "exact"]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A sequence, and what it comes to before its messages are known."""

    problem: Problem
    sequence: Ints
    objective_s: float
    """The makespan or the span; infinite where the sequence does not fit."""
    method: Method
    family: Schedule | None = None
    """The family's schedule, where the sequence comes from one."""
    setting: Setting | None = None
    """The setting of the list schedule, where the sequence is one."""

    @classmethod
    def of(cls, problem: Problem, sequence: Ints, method: Method, *, by_span: bool, **source: Any) -> "Candidate":
        """Time a sequence; `source` is its family or its setting."""
        timed = run(problem, sequence)
        objective_s = timed.objective_s(by_span=by_span) if timed.fits(problem) else math.inf
        return cls(problem, sequence, objective_s, method, **source)

    @property
    def fits(self) -> bool:
        return self.objective_s < math.inf

    def schedule(self) -> Schedule:
        """Return the schedule to run."""
        if self.family is not None:
            return self.family
        return self.problem.schedule(self.sequence, f"searched ({self.method})")


def by_objective(candidate: Candidate) -> float:
    """Return the key by which candidates are sorted."""
    return candidate.objective_s


def of_families(problem: Problem, *, by_span: bool) -> Iterator[Candidate]:
    """Yield the schedule of every registered family of the shape, whether it fits or not."""
    for schedule in families_of([problem.placement], problem.num_microbatches):
        yield Candidate.of(problem, sequence_of(schedule), "family", by_span=by_span, family=schedule)


def families_of(placements: Collection[Placement], num_microbatches: int) -> Iterator[Schedule]:
    """Yield the schedules of all families, with the families' defaults, that train on one of the placements."""
    for num_ranks, num_stages in {(placement.num_ranks, placement.num_stages) for placement in placements}:
        for name in FAMILIES:
            try:
                schedule = build(name, ranks=num_ranks, microbatches=num_microbatches, stages=num_stages)
            except ConfigError:
                continue
            if schedule.placement in placements and not schedule.is_forward_only:
                yield schedule


def of_constructions(problem: Problem, *, by_span: bool, is_over: Callable[[], bool]) -> Iterator[Candidate]:
    """Yield sweeps, and list schedules of all settings: of these, after the first that fits, as many as time allows."""
    candidate_of = partial(Candidate.of, problem, method="list", by_span=by_span)
    sweeps = [candidate_of(sequence) for sequence in sequences_of_sweeps(problem) if sequence is not None]
    yield from sweeps
    has_fitting = any(candidate.fits for candidate in sweeps)
    for setting in settings_for(problem):
        if has_fitting and is_over():
            return
        sequence = list_schedule(problem, setting)
        if sequence is not None:
            candidate = candidate_of(sequence, setting=setting)
            has_fitting = has_fitting or candidate.fits
            yield candidate


def different(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates that fit, without those whose ranks have the same orders as an earlier one's."""
    candidate_of_orders: dict[bytes, Candidate] = {}
    for candidate in candidates:
        if candidate.fits:
            ranks = candidate.problem.rank[candidate.sequence]
            orders = candidate.sequence[np.argsort(ranks, kind="stable")]
            candidate_of_orders.setdefault(orders.tobytes(), candidate)
    return list(candidate_of_orders.values())
