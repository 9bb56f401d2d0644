"""Calls that have the data of a batch there before their first use, and drop them after the last one.

The rule of pulling: the first microbatch comes with the agreement on the step. Each further one is pulled as soon as
the one before it has been used and this rank is about to wait for a message, at the latest right before the action that
needs it. So a pull takes time in which the rank would wait, or in which a device works off what it was given, and
delays no message that could leave before it. An action that needs a later microbatch pulls those before it too. What
is copied to a device is on its way from the pull on; only the first use itself waits for it.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from penstock.execute.stages.stage import Stage
from penstock.execute.step import Bound, Step
from penstock.ir.operations import RUNS_FORWARD
from penstock.ir.program import Program


def rows_that_take_data(program: Program, rows: range, stages: Mapping[int, Stage]) -> dict[int, int]:
    """Return, per row of a rank that may take something of the batch, its microbatch."""
    first, last = program.placement.previous_stage, program.placement.next_stage
    takes = {index for index, stage in stages.items() if first[index] < 0 or last[index] < 0 or stage.keyword_names()}
    forwards = (row for row in rows if RUNS_FORWARD[program.op[row]] and int(program.stage[row]) in takes)
    return {row: int(program.microbatch[row]) for row in forwards}


def with_data_calls(bounds: Sequence[Bound], needs: Mapping[int, int]) -> list[Bound]:
    """Return a rank's calls with those for its data; `needs` gives, per row that takes data, its microbatch."""
    first, last = _uses(bounds, needs)
    pulls = _pulls(bounds, first)
    arrivals = {position: microbatch for microbatch, position in first.items()}
    releases = {position: microbatch for microbatch, position in last.items()}
    found: list[Bound] = []
    for position, bound in enumerate(bounds):
        found += [Bound(bound.row, partial(_pull, microbatch)) for microbatch in pulls.get(position, ())]
        if position in arrivals:
            found.append(Bound(bound.row, partial(_arrive, arrivals[position])))
        found.append(bound)
        if position in releases:
            found.append(Bound(bound.row, partial(_release, releases[position])))
    return found


def _pull(microbatch: int, step: Step) -> None:
    assert step.prefetcher is not None
    step.prefetcher.pull(microbatch)


def _arrive(microbatch: int, step: Step) -> None:
    assert step.prefetcher is not None
    step.prefetcher.arrive(microbatch)


def _release(microbatch: int, step: Step) -> None:
    assert step.prefetcher is not None
    step.prefetcher.release(microbatch)


def _uses(bounds: Sequence[Bound], needs: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Per microbatch, the first and the last call of a row that takes its data."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, bound in enumerate(bounds):
        if bound.row in needs:
            first.setdefault(needs[bound.row], position)
            last[needs[bound.row]] = position
    return first, last


def _pulls(bounds: Sequence[Bound], first: Mapping[int, int]) -> dict[int, list[int]]:
    """Before which call which microbatches are pulled."""
    pulls: dict[int, list[int]] = {}
    used = -1
    for microbatch, position in first.items():
        # The first wait since the last use: there the rank would stand still anyway.
        waits = (at for at in range(used + 1, position) if bounds[at].awaits is not None)
        pulls.setdefault(next(waits, position), []).append(microbatch)
        # The whole row: its first call may be the wait before it.
        used = position
        while used + 1 < len(bounds) and bounds[used + 1].row == bounds[position].row:
            used += 1
    return pulls
