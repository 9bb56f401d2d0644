"""Costs with which schedules of any number of stages and slices do equal work: those of all that a rank does."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.simulation.costs.costs import COMPUTE_FIELDS, FIELD_OF_OP, STATIC_BYTES, VALUE_BYTES, Costs

SHARED_BY_STAGES = (
    *COMPUTE_FIELDS, *STATIC_BYTES, *FIELD_OF_OP.values(), "activation_bytes", "weight_context_bytes",
)  # fmt: skip
"""Costs of the layers of a stage: half as many layers have half of them, but messages keep their size."""
SHARED_BY_SLICES = (*COMPUTE_FIELDS, *VALUE_BYTES)


def has_entry_per_rank(costs: Costs, placement: Placement) -> bool:
    """Return whether a cost of computations or bytes has an entry per rank, where a rank has several stages."""
    names = (*SHARED_BY_STAGES, *SHARED_BY_SLICES)
    lengths = {len(getattr(costs, name)) for name in names} - {1, placement.num_stages}
    return placement.num_ranks in lengths


def share_of_rank(costs: Costs, schedule: Schedule | Program) -> Costs:
    """Return the costs of one stage and slice, where `costs` are those of all that a rank has of the model.

    The stages that a microbatch visits on a rank share a cost that is the same for all ranks, or that has an entry per
    rank; entries per stage are those of the stages already. Slices share all three.
    """
    placement = schedule.placement
    of_stage, of_slice = 1 / placement.stages_per_rank, Fraction(1, schedule.num_slices)
    changed: dict[str, Any] = {}
    for name in dict.fromkeys((*SHARED_BY_STAGES, *SHARED_BY_SLICES)):
        entries = getattr(costs, name)
        is_of_rank = len(entries) in (1, placement.num_ranks) and len(entries) != placement.num_stages
        if is_of_rank and len(entries) > 1:
            entries = tuple(entries[rank] for rank in ranks_of_layers(placement))
        share = of_stage if is_of_rank and name in SHARED_BY_STAGES else Fraction(1)
        share *= of_slice if name in SHARED_BY_SLICES else 1
        is_size = name.endswith("_bytes")
        changed[name] = tuple(round(share * entry) if is_size else float(share) * entry for entry in entries)
    return replace(costs, **changed)


def ranks_of_layers(placement: Placement) -> Iterator[int]:
    """Yield per stage the rank that has its layers on the first route: a second copy of the model costs the same."""
    first_route = placement.routes[0]
    layers_of_stage = {stage: position for route in placement.routes for position, stage in enumerate(route)}
    for stage in range(placement.num_stages):
        yield placement.rank_of_stage[first_route[layers_of_stage[stage]]]
