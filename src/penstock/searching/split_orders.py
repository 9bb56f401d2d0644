"""Another split of the layers for a search whose usual split leaves no order within its limit of bytes.

The order decides how much a rank holds, and it is not known before the search. So splits are looked for under orders
that are known: those of the families of a placement, and that of one microbatch at a time, which needs least memory.
The one that is fastest is where the search begins again.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.units import format_bytes
from penstock.lowering import lower
from penstock.partition.split import split_text
from penstock.placement import Placement
from penstock.planning import layers_of_stages
from penstock.proofs import Limit
from penstock.searching.candidates import families_of
from penstock.searching.fitting import Split, fitting_split
from penstock.simulation import LayerCosts, simulate

BACKWARDS = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def split_within(
    costs: LayerCosts, placements: Sequence[Placement], microbatches: int, limit: Limit
) -> tuple[Placement, Split]:
    """Return the placement and the layers per stage with which a known order fits a memory limit: the fastest pair.

    Known orders are those of the families of schedules, and one microbatch at a time, which needs least memory.

    Raises:
        ScheduleError: none of these orders fits with any split that was found; the message names what needs least.
    """
    fastest_s, fastest = inf, None
    least_memory: tuple[float, Split, bool] = (inf, (), True)
    for placement in placements:
        for schedule in (one_at_a_time(placement, microbatches), *families_of([placement], microbatches)):
            # Look for a split with which this order fits. `splits.least` is the one that needs least memory.
            program = lower(schedule)
            most_bytes = limit.of_ranks(program.num_ranks, schedule.parts_per_rank)
            splits = fitting_split(costs, program, most_bytes, costs.shards)
            least_memory = min(least_memory, (splits.least_bytes, splits.least, splits.is_exact))
            if splits.split is None:
                continue
            # Of all orders that fit with a split, the fastest counts.
            stage_layers = layers_of_stages(replace(costs, split=splits.split), placement)
            makespan_s = simulate(program, costs.of_table(schedule, stage_layers)).makespan_s
            if makespan_s < fastest_s:
                fastest_s, fastest = makespan_s, (placement, splits.split)
    if fastest is None:
        num_bytes, split, is_exact = least_memory
        scope = "whatever the split" if is_exact else "and not every split was tried"
        raise ScheduleError(
            f"no order was found that fits a limit of {limit}, {scope}; with one microbatch at a time, which needs "
            f"least, a rank holds {format_bytes(int(num_bytes))} with {split_text(split)}. Raise the limit, or give "
            "more ranks or smaller layers"
        )
    return fastest


def one_at_a_time(placement: Placement, microbatches: int) -> Schedule:
    """Return the order in which every microbatch goes forward and backward before the next one begins."""
    (route,) = placement.routes
    orders = []
    for stages in placement.stages_of_rank:
        forwards = [(Kind.FORWARD, stage) for stage in route if stage in stages]
        backwards = [(kind, stage) for _, stage in reversed(forwards) for kind in BACKWARDS]
        rows = [(kind, stage, number) for number in range(microbatches) for kind, stage in (*forwards, *backwards)]
        orders.append(np.array(rows, np.int64))
    return Schedule.from_arrays("one at a time", placement, orders, num_microbatches=microbatches)
