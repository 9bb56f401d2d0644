"""Run a case on one rank and on two, and say how it ended."""

import traceback
from dataclasses import replace

import torch

from tests.random_cut_models.cases import Case
from tests.random_cut_models.verdict import Verdict
from tests.support.cut_models import outcome_of, plain_call


def shrink(verdict):
    """Return the verdict of the fewest features of a wrong case that are wrong by themselves."""
    smaller = [[name for name in verdict.features if name != left_out] for left_out in verdict.features]
    for names in smaller if len(verdict.features) > 1 else ():
        other = judge(verdict.seed, names)
        if other.outcome == verdict.outcome:
            return shrink(other)
    return verdict


def judge(seed, names=None, ranks=(1, 2), **changes):
    """Run the case of a seed; `changes` are of its courses."""
    torch.set_num_threads(1)
    case = Case(seed, names)
    try:
        course = case.course(1)
        for call in course.calls:
            plain_call(course.model, course, call)
    except Exception as error:
        details = "".join(traceback.format_exception(error))
        return Verdict(seed, "IMPOSSIBLE", f"{type(error).__name__}: {error}"[:200], f"{case}\n{details}")
    courses = {num_ranks: replace(case.course(num_ranks), **changes) for num_ranks in ranks}
    outcomes = {num_ranks: outcome_of(course) for num_ranks, course in courses.items()}
    kinds = {outcome.kind for outcome in outcomes.values()}
    kind = next(kind for kind in ("WRONG", "REFUSED", "RIGHT") if kind in kinds)
    text = next(outcome.text for outcome in outcomes.values() if outcome.kind == kind)
    lines = [f"  {n} ranks: {o.kind} in call {o.call}: {o.text}" for n, o in outcomes.items() if o.kind != "RIGHT"]
    return Verdict(seed, kind, text, "\n".join([str(case), *lines]), tuple(type(f).__name__ for f in case.features))
