"""Random problems and settings of list schedules, whose sequences `tests/data/list_schedules.json` has recorded."""

from dataclasses import replace
from hashlib import sha256

import numpy as np

from penstock.placement import Placement
from penstock.searching.listing import Setting, list_schedule
from penstock.searching.problem import Problem
from penstock.searching.settings import ANY_NUMBER, WAITS
from penstock.simulation import Costs
from tests.searching.cases import random_costs

PLACEMENTS = [
    Placement.line(1),
    Placement.line(4),
    Placement.vee(4),
    Placement.loop(3, 6),
    Placement.wave(2, 8),
    Placement.loop(2, 8),
    Placement.explicit([1, 0, 0, 2, 1, 2, 0]),
]
NUM_CASES = 140
SETTINGS_PER_CASE = 12


def random_problem(seed):
    """Even and uneven costs, links that carry one message at a time, launches, uneven microbatches, tight limits."""
    random = np.random.default_rng(seed)
    placement, microbatches = PLACEMENTS[seed % len(PLACEMENTS)], int(random.integers(1, 10))
    options = {
        "is_exclusive": bool(random.integers(2)),
        "launch_s": float(random.choice([0.0, 0.05])),
        "microbatch_compute_factor": random.choice([0.5, 1.0, 2.0], microbatches) if seed % 3 == 0 else (1.0,),
        "microbatch_bytes_factor": random.choice([0.5, 1.0, 2.0], microbatches) if seed % 5 == 0 else (1.0,),
    }
    even = Costs.uniform(transfer=float(random.choice([0.0, 0.5])), activation_bytes=10, weight_context_bytes=4)
    costs = even if seed % 4 == 0 else random_costs(seed, placement.num_stages, **options)
    problem = Problem.of(placement, microbatches, costs)
    most = 10 * (placement.num_stages // placement.num_ranks + int(random.integers(1, 7)))
    return problem if seed % 6 == 0 else replace(problem, limit=np.full(placement.num_ranks, most, np.int64))


def random_setting(random, problem):
    ranks, stages = problem.num_ranks, problem.num_stages
    most_under_way = random.choice([1, 2, 3, 5, ANY_NUMBER], stages).astype(np.int32)
    prefers_inputs, deep_first = random.integers(2, size=(2, ranks)).astype(np.bool_)
    return Setting(most_under_way, prefers_inputs, random.choice(WAITS, ranks).astype(np.float64), deep_first)


def digest_of(seed):
    """A digest of the sequences of several settings of a problem, and how many of them come to their end."""
    problem, random = random_problem(seed), np.random.default_rng([seed, 1])
    sequences = [list_schedule(problem, random_setting(random, problem)) for _ in range(SETTINGS_PER_CASE)]
    complete = [sequence for sequence in sequences if sequence is not None]
    texts = ["none" if sequence is None else str(sequence.tolist()) for sequence in sequences]
    return sha256(" ".join(texts).encode()).hexdigest()[:12], len(complete)
