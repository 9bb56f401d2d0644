"""One schedule of several models, each of which takes the outputs of the one before it: an encoder, then a decoder.

Every rank runs the forwards of the first model, then all that the second one does, then the backwards of the first:

    first     0F0 0F1 0B0 0B1     second    0F0 0B0 0F1 0B1
    chain     0F0 0F1 | 1F0 1B0 1F1 1B1 | 0B0 0B1

The stages of the second model are numbered after those of the first, and a microbatch visits them in this order. So a
chain is an ordinary schedule, and everything that proves, lowers, simulates or runs schedules takes it as it is.

A chain of schedules that have no cycle has none. The forwards of the first model wait for each other alone, in an order
in which they could run before. The second model waits for them and for itself. What is left of the first model waits
for both and for itself, again in an order in which it could run before, and nothing in front of it waits for it.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import index

import numpy as np

from penstock.errors import ConfigError, count_of, described, shortened
from penstock.ir.hot import Int64s
from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement


def chain(*schedules: Schedule, ranks: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Return one schedule for models that follow one another, given the schedule of each.

    Its stages are those of the first model, then those of the second, and so on. Every rank runs the forwards of all
    models but the last, in turn, then all actions of the last one, then what is left of the others, from the last but
    one to the first. So a rank keeps the activations of all microbatches of every model but the last.

    `ranks` has for each schedule the ranks of the chain on which its ranks 0, 1, ... run; by default the same numbers.
    A forward and a backward overlap as a pair in the last model alone.

    Raises:
        ConfigError: for anything but schedules; where these differ in their numbers of microbatches, slices or routes,
            in the route of a microbatch, or in whether they have backwards; and for `ranks` that do not fit them.
        ScheduleError: if a rank below the largest has no stage.
    """
    _require_alike(schedules)
    ranks_of_models = _checked_ranks(schedules, ranks)
    first_stages = [0, *accumulate(schedule.num_stages for schedule in schedules)]
    placement = _placement(schedules, ranks_of_models, first_stages)
    last, tables = len(schedules) - 1, []
    for model, schedule in enumerate(schedules):
        rank = ranks_of_models[model][schedule.rank_of_row]
        part = np.where(schedule.kind == Kind.FORWARD, model, 2 * last - model)
        stage = schedule.stage + np.int64(first_stages[model])
        tables.append(np.stack([rank, part, schedule.kind, stage, schedule.microbatch, schedule.slice], axis=1))
    rows = np.concatenate(tables)  # [num_rows, 6]
    joined = np.concatenate([schedule.joined for schedule in schedules])
    # A pair whose actions are in two parts of the chain is none, even where a rank has no rows of the parts between:
    # the backward may wait for other ranks that wait for the forward.
    joined[:-1] &= rows[:-1, 1] == rows[1:, 1]
    # A rank runs one part of the chain after the other, and the rows of a part as before.
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    rank, actions = rows[order, 0], rows[order, 2:]
    return Schedule.from_arrays(
        " then ".join(schedule.name for schedule in schedules),
        placement,
        np.split(actions, np.searchsorted(rank, range(1, placement.num_ranks))),
        num_microbatches=schedules[0].num_microbatches,
        num_slices=schedules[0].num_slices,
        joined=joined[order],
        route_of_microbatch=schedules[0].route_of_microbatch,
    )


def _placement(
    schedules: Sequence[Schedule], ranks_of_models: Sequence[Int64s], first_stages: Sequence[int]
) -> Placement:
    """Return the placement of all stages; each route goes on with the route of the next model that has its number."""
    rank_of_stage: list[int] = []
    routes: list[list[int]] = [[] for _ in schedules[0].placement.routes]
    for schedule, ranks_of_model, first_stage in zip(schedules, ranks_of_models, first_stages, strict=False):
        rank_of_stage += ranks_of_model[list(schedule.placement.rank_of_stage)].tolist()
        for route, route_of_model in zip(routes, schedule.placement.routes, strict=True):
            route += [first_stage + stage for stage in route_of_model]
    return Placement.explicit(rank_of_stage, routes)


def _require_alike(schedules: Sequence[Schedule]) -> None:
    """Refuse schedules that cannot run the same microbatches one after another. Raises: ConfigError."""
    if not schedules:
        raise ConfigError("none are given; pass one for each model", key="schedules")
    for schedule in schedules:
        if not isinstance(schedule, Schedule):
            raise ConfigError(
                f"{described(schedule)}; expected a Schedule, as penstock.build returns, or the actions() of a program",
                key="schedules",
            )
    first = schedules[0]
    for schedule in schedules[1:]:
        facts = _facts(schedule)
        for key, fact in _facts(first).items():
            if fact != facts[key]:
                raise ConfigError(
                    f"{first.name} has {fact}, {schedule.name} has {facts[key]}; make them alike", key=key
                )
        differing = np.flatnonzero(first.route_of_microbatch != schedule.route_of_microbatch)
        if len(differing):
            raise ConfigError(
                f"microbatch {differing[0]} travels route {first.route_of_microbatch[differing[0]]} of {first.name}, "
                f"but route {schedule.route_of_microbatch[differing[0]]} of {schedule.name}; make them alike",
                key="routes",
            )


def _facts(schedule: Schedule) -> dict[str, str]:
    """Return what must be equal in all schedules of a chain, by what it is called where a schedule is made."""
    return {
        "microbatches": count_of(schedule.num_microbatches, "microbatch"),
        "slices": count_of(schedule.num_slices, "slice"),
        "forward_only": "forwards alone" if schedule.is_forward_only else "backwards too",
        "routes": count_of(len(schedule.placement.routes), "route"),
    }


def _checked_ranks(schedules: Sequence[Schedule], ranks: Sequence[Sequence[int]] | None) -> list[Int64s]:
    """Return for each schedule [num_ranks] the new number of each of its ranks. Raises: ConfigError."""
    if ranks is None:
        return [np.arange(schedule.num_ranks) for schedule in schedules]
    counts = [schedule.num_ranks for schedule in schedules]
    try:
        ranks_of_models = [list(map(index, ranks_of_model)) for ranks_of_model in ranks]
    except TypeError:
        ranks_of_models = []
    if len(ranks_of_models) != len(counts) or not all(map(_are_numbers, ranks_of_models, counts)):
        raise ConfigError(
            f"{shortened(ranks)}; expected one list for each schedule, of {' and '.join(map(str, counts))} different "
            "ranks from 0 on",
            key="ranks",
        )
    return [np.array(ranks_of_model) for ranks_of_model in ranks_of_models]


def _are_numbers(ranks: Sequence[int], count: int) -> bool:
    """Return whether these are so many different numbers of ranks."""
    return len(ranks) == len(set(ranks)) == count and min(ranks) >= 0
