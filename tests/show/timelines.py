"""Timelines to draw."""

from penstock.lower import lower
from penstock.schedules import build
from penstock.simulate import Costs, simulate

COSTS = Costs.uniform(forward=0.010, backward_input=0.010, backward_weight=0.010, transfer=0.001)


def timeline_of(num_ranks, num_microbatches, name="1f1b", costs=COSTS):
    return simulate(lower(build(name, ranks=num_ranks, microbatches=num_microbatches)), costs)
