"""The start of a search: families, and constructions under a limit that leaves room for messages."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.errors import ScheduleError, count_of
from penstock.ir.live import peak_bytes
from penstock.lowering import lower
from penstock.proofs import Limit
from penstock.searching.asked import Asked, sizes_and_limit
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective, of_constructions
from penstock.searching.problem import Bytes, Problem
from penstock.searching.sequences import sequence_of
from penstock.searching.split_orders import one_at_a_time

NUM_KEPT = 32
"""The best ones of a start, at most."""
NUM_TIGHTENED = 3
"""Times that the limit is lowered to make room for messages."""


def starts_of(problem: Problem, families: Sequence[Candidate], asked: Asked, budget: Budget) -> list[Candidate]:
    """Return the best constructions, and the best families that fit.

    Where the program of the best one breaks the limit by its messages, the limit is lowered by what was missing.
    """
    found: list[Candidate] = []
    for _ in range(NUM_TIGHTENED + 1):
        found = _fitting(problem, families, asked, budget) or found
        missing = _missing(found[0], asked) if found else np.zeros(1, np.int64)
        if not missing.any():
            break
        problem = replace(problem, limit=problem.limit - missing)
    return found


def last_resort(problem: Problem, asked: Asked) -> list[Candidate]:
    """Return the order with one microbatch at a time, if it fits, under a limit lowered by what its messages take.

    Constructions choose what a rank runs next, so with several stages a rank they may run into the limit and end
    nowhere, and they do not count messages. This order fits wherever any order of split backwards does, unless tensors
    saved for weight gradients are larger than activations. The lower limit leaves room for messages in all orders that
    improve it.
    """
    schedule = one_at_a_time(problem.placement, problem.num_microbatches)
    program = lower(schedule)
    sizes, _ = sizes_and_limit(program, asked.costs, Limit.read(asked.memory_limit))
    room = np.array(peak_bytes(program, sizes)) - np.array(peak_bytes(schedule, sizes))
    lowered = replace(problem, limit=problem.limit - room)
    candidate = Candidate.of(lowered, sequence_of(schedule), "list", by_span=asked.by_span)
    return [candidate] if candidate.fits else []


def _fitting(problem: Problem, families: Sequence[Candidate], asked: Asked, budget: Budget) -> list[Candidate]:
    found = list(of_constructions(problem, by_span=asked.by_span, is_over=lambda: budget.is_over))
    budget.spent += len(found)
    of = partial(Candidate.of, problem, method="family", by_span=asked.by_span)
    found += [of(each.sequence, family=each.family) for each in families]
    return sorted((each for each in found if each.fits), key=by_objective)[:NUM_KEPT]


def _missing(candidate: Candidate, asked: Asked) -> Bytes:
    """[num_ranks] by how much its program is above the limit."""
    if asked.memory_limit is None:
        return np.zeros(1, np.int64)
    program = lower(candidate.schedule())
    sizes, most = sizes_and_limit(program, asked.costs, Limit.read(asked.memory_limit))
    return np.maximum(np.array(peak_bytes(program, sizes)) - most, 0)


def nothing_fits(questions: Sequence[tuple[Problem, Asked]]) -> ScheduleError:
    """Say what a rank holds with one microbatch at a time, the last order that a search tries."""
    rank, amount = min((_least_of(problem, asked) for problem, asked in questions), key=lambda least: least[1])
    limit = questions[0][1].memory_limit
    held = f"{amount:,} bytes" if Limit.read(limit).in_bytes else count_of(amount, "activation")
    return ScheduleError(
        f"no order was found that fits a limit of {limit}; with one microbatch at a time, which needs least, rank "
        f"{rank} holds {held}. Raise the limit, or give more ranks or smaller stages"
    )


def _least_of(problem: Problem, asked: Asked) -> tuple[int, int]:
    """Return the rank that holds most where one microbatch is under way, and how much that is with its messages."""
    program = lower(one_at_a_time(problem.placement, problem.num_microbatches))
    sizes, _ = sizes_and_limit(program, asked.costs, Limit.read(asked.memory_limit))
    held = sizes.static_of_ranks(problem.placement) + np.array(peak_bytes(program, sizes))
    return int(held.argmax()), int(held.max())
