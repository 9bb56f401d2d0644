"""Costs with which schedules of any number of stages and slices do equal work: those of all that a rank does."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from penstock.ir.schedule import Schedule
from penstock.simulation.costs.costs import COMPUTE_FIELDS, FIELD_OF_OP, STATIC_BYTES, VALUE_BYTES, Costs

SHARED_BY_STAGES = (
    *COMPUTE_FIELDS, *STATIC_BYTES, *FIELD_OF_OP.values(), "activation_bytes", "weight_context_bytes",
)  # fmt: skip
"""Costs of the layers of a stage: half as many layers have half of them, but messages keep their size."""
SHARED_BY_SLICES = (*COMPUTE_FIELDS, *VALUE_BYTES)


def share_of_rank(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of one stage and slice, where `costs` are those of all that a rank has of the model.

    The stages that a microbatch visits on a rank share a cost that is the same for all stages; entries per stage are
    those of the stages already. Slices share both.
    """
    of_stage, of_slice = 1 / schedule.placement.stages_per_rank, Fraction(1, schedule.num_slices)
    changed: dict[str, Any] = {}
    for name in dict.fromkeys((*SHARED_BY_STAGES, *SHARED_BY_SLICES)):
        entries = getattr(costs, name)
        share = of_stage if name in SHARED_BY_STAGES and len(entries) == 1 else Fraction(1)
        share *= of_slice if name in SHARED_BY_SLICES else 1
        is_size = name.endswith("_bytes")
        changed[name] = tuple(round(share * each) if is_size else float(share) * each for each in entries)
    return replace(costs, **changed)
