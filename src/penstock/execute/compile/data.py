"""Calls that have the data of a batch there before their first use, and drop them after the last one.

The rule of pulling: the first microbatch comes with the agreement on the step. Each further one is pulled as soon as
the one before it has been used and this rank is about to wait for a message, at the latest right before the action that
needs it. So a pull takes time in which the rank would wait, or in which a device works off what it was given, and
delays no message that could leave before it. A LOAD in the program before that action pulls in its stead. An action
that needs a later microbatch pulls those before it too. What is copied to a device is on its way from the pull on; only
the first use itself waits for it.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller

from penstock.execute.stages.stage import Stage
from penstock.execute.step import Bound
from penstock.ir.collectives import LOADS_DATA
from penstock.ir.operations import RUNS_FORWARD
from penstock.ir.program import Program


def microbatch_of_data_row(program: Program, rows: range, stages: Mapping[int, Stage]) -> dict[int, int]:
    """Return the microbatch of each row of a rank that may take inputs or a target of the batch, by row."""
    first, last = program.placement.previous_stage, program.placement.next_stage
    takes = {index for index, stage in stages.items() if first[index] < 0 or last[index] < 0 or stage.keyword_names()}
    forwards = (row for row in rows if RUNS_FORWARD[program.op[row]] and int(program.stage[row]) in takes)
    return {row: int(program.microbatch[row]) for row in forwards}


def microbatch_of_load_row(program: Program, rows: range) -> dict[int, int]:
    """Return the microbatch of each LOAD of a rank, by row."""
    return {row: int(program.microbatch[row]) for row in rows if LOADS_DATA[program.op[row]]}


def with_data_calls(
    bounds: Sequence[Bound], needs: Mapping[int, int], loads: Mapping[int, int] | None = None
) -> list[Bound]:
    """Return a rank's calls with those for its data.

    `needs` gives, per row that takes data, its microbatch; `loads` gives that of each row that loads one, if any.
    """
    first_uses, last_uses = _uses(bounds, needs)
    first_loads, _ = _uses(bounds, loads or {})
    pulls = _pulls(bounds, first_uses, first_loads)
    arrivals = {position: [microbatch] for microbatch, position in first_uses.items()}
    releases = {position: [microbatch] for microbatch, position in last_uses.items()}
    all_bounds: list[Bound] = []
    for position, bound in enumerate(bounds):
        all_bounds += [_bound(bound.row, methodcaller("pull", index)) for index in pulls.get(position, ())]
        all_bounds += [_bound(bound.row, methodcaller("arrive", index)) for index in arrivals.get(position, ())]
        all_bounds.append(bound)
        all_bounds += [_bound(bound.row, methodcaller("release", index)) for index in releases.get(position, ())]
    return all_bounds


def _bound(row: int, act: Callable[..., None]) -> Bound:
    """Return a call of a row in which the prefetcher of the step acts."""
    return Bound(row, lambda step: act(step.prefetcher))


def _uses(bounds: Sequence[Bound], needs: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the positions of the first and the last call of these rows, by microbatch."""
    first_uses: dict[int, int] = {}
    last_uses: dict[int, int] = {}
    for position, bound in enumerate(bounds):
        if bound.row in needs:
            first_uses.setdefault(needs[bound.row], position)
            last_uses[needs[bound.row]] = position
    return first_uses, last_uses


def _pulls(
    bounds: Sequence[Bound], first_uses: Mapping[int, int], first_loads: Mapping[int, int]
) -> dict[int, list[int]]:
    """Return the microbatches that are pulled before a call, by its position; those that a row has loaded are not."""
    pulls: dict[int, list[int]] = {}
    last_used = -1
    for microbatch, position in first_uses.items():
        # The pull comes at the first wait since the last use: there the rank would stand still anyway.
        waits = (index for index in range(last_used + 1, position) if bounds[index].awaits is not None)
        if first_loads.get(microbatch, position) >= position:
            pulls.setdefault(next(waits, position), []).append(microbatch)
        # The use ends with the last call of its row: the first one may be the wait before it.
        last_used = position
        while last_used + 1 < len(bounds) and bounds[last_used + 1].row == bounds[position].row:
            last_used += 1
    return pulls
