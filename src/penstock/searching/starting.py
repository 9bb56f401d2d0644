"""The start of a search: families, and constructions under a limit that leaves room for messages."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.errors import ScheduleError, count_of
from penstock.ir.live import peak_bytes
from penstock.lowering import lower
from penstock.proofs import Limit
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective, of_constructions
from penstock.searching.problem import Bytes, Problem
from penstock.searching.question import Question, sizes_and_limit
from penstock.searching.sequences import sequence_of
from penstock.searching.split_orders import one_at_a_time

MOST_STARTS = 32
"""The most candidates with which a search starts."""
NUM_TIGHTENED = 3
"""How many times the limit is lowered to make room for messages."""


def starts_of(problem: Problem, families: Sequence[Candidate], question: Question, budget: Budget) -> list[Candidate]:
    """Return the best constructions, and the best families that fit.

    Where the program of the best one breaks the limit by its messages, the limit is lowered by what was missing.
    """
    starts: list[Candidate] = []
    for _ in range(NUM_TIGHTENED + 1):
        starts = _fitting(problem, families, question, budget) or starts
        missing_bytes = excess_bytes(starts[0], question) if starts else np.zeros(1, np.int64)
        if not missing_bytes.any():
            break
        problem = replace(problem, limit=problem.limit - missing_bytes)
    return starts


def last_resort(problem: Problem, question: Question) -> list[Candidate]:
    """Return the order with one microbatch at a time, if it fits, under a limit lowered by what its messages take.

    Constructions choose what a rank runs next, so with several stages a rank they may run into the limit and end
    nowhere, and they do not count messages. This order fits wherever any order of split backwards does, unless tensors
    saved for weight gradients are larger than activations. The lower limit leaves room for messages in all orders that
    improve it.
    """
    schedule = one_at_a_time(problem.placement, problem.num_microbatches)
    program = lower(schedule)
    sizes, _ = sizes_and_limit(program, question.costs, Limit.read(question.memory_limit))
    message_bytes = np.array(peak_bytes(program, sizes)) - np.array(peak_bytes(schedule, sizes))
    tight_problem = replace(problem, limit=problem.limit - message_bytes)
    candidate = Candidate.of(tight_problem, sequence_of(schedule), "list", by_span=question.by_span)
    return [candidate] if candidate.fits else []


def _fitting(problem: Problem, families: Sequence[Candidate], question: Question, budget: Budget) -> list[Candidate]:
    """Return the best constructions and families that fit, the shortest first."""
    candidates = list(of_constructions(problem, by_span=question.by_span, is_over=lambda: budget.is_over))
    budget.spent += len(candidates)
    candidate_of = partial(Candidate.of, problem, method="family", by_span=question.by_span)
    candidates += [candidate_of(candidate.sequence, family=candidate.family) for candidate in families]
    return sorted((candidate for candidate in candidates if candidate.fits), key=by_objective)[:MOST_STARTS]


def excess_bytes(candidate: Candidate, question: Question) -> Bytes:
    """Return by how much each rank of a candidate's program is above the limit, [num_ranks]."""
    if question.memory_limit is None:
        return np.zeros(1, np.int64)
    program = lower(candidate.schedule())
    sizes, most_bytes = sizes_and_limit(program, question.costs, Limit.read(question.memory_limit))
    return np.maximum(np.array(peak_bytes(program, sizes)) - most_bytes, 0)


def nothing_fits(questions: Sequence[tuple[Problem, Question]]) -> ScheduleError:
    """Say what a rank holds with one microbatch at a time, the last order that a search tries."""
    rank, amount = min((_fullest_rank(*question) for question in questions), key=lambda fullest: fullest[1])
    limit = questions[0][1].memory_limit
    amount_text = f"{amount:,} bytes" if Limit.read(limit).in_bytes else count_of(amount, "activation")
    return ScheduleError(
        f"no order was found that fits a limit of {limit}; with one microbatch at a time, which needs least, rank "
        f"{rank} holds {amount_text}. Raise the limit, or give more ranks or smaller stages"
    )


def _fullest_rank(problem: Problem, question: Question) -> tuple[int, int]:
    """Return the rank that holds most where one microbatch is under way, and how much that is with its messages."""
    program = lower(one_at_a_time(problem.placement, problem.num_microbatches))
    sizes, _ = sizes_and_limit(program, question.costs, Limit.read(question.memory_limit))
    bytes_of_ranks = sizes.static_of_ranks(problem.placement) + np.array(peak_bytes(program, sizes))
    return int(bytes_of_ranks.argmax()), int(bytes_of_ranks.max())
