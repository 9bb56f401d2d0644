"""Problems of searches for tests."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.placement import Placement
from penstock.searching.problem import Problem
from penstock.simulation import Costs

DATA = Path(__file__).parents[1] / "data"
UNITS = 10
"""Of memory in the data, which have halves."""


def rows(name):
    return json.loads((DATA / name).read_text())


def random_costs(seed, num_stages, **others):
    random = np.random.default_rng(seed)
    seconds = {
        name: random.uniform(1.0, 3.0, num_stages) for name in ("forward_s", "backward_input_s", "backward_weight_s")
    }
    sizes = {"activation_bytes": (10,), "weight_context_bytes": (6,), "message_bytes": (5,)}
    return Costs(**(seconds | sizes | {"latency_s": 0.1, "bandwidth_bytes_per_s": 20.0} | others))


def searched_case(row):
    """The placement, the microbatches, the costs and the limit of a search by the zero-bubble schedulers."""
    kind, ranks, microbatches, *_ = row["name"].split("/")
    ranks, microbatches = int(ranks[1:]), int(microbatches[1:])
    forward, inputs, weights, transfer = row["seconds"]
    of_forward, of_input, _ = row["memory"]
    costs = Costs.uniform(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        transfer=transfer,
        activation_bytes=round(of_forward * UNITS),
        weight_context_bytes=round((of_forward + of_input) * UNITS),
    )
    placement = Placement.line(ranks) if kind == "zb" else Placement.vee(ranks)
    limit = None if row["limit"] is None else round(row["limit"] * UNITS)
    return placement, microbatches, costs, limit


def problem_of(placement, microbatches, costs, limit=None):
    problem = Problem.of(placement, microbatches, costs)
    return problem if limit is None else replace(problem, limit=np.full(placement.num_ranks, limit, np.int64))
