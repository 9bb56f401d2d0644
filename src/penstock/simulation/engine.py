"""The simulator: when every instruction of a program would run under given costs.

A rank runs its instructions in order. A computation starts when the rank is free, its message has arrived and its stage
is gathered. Sends, receives, gathers, reductions over replicas and copies are launched in their place in the order and
hold nothing up: what they do takes place beside the rank, as a lag or in queues (`simulation.queues`) that are walked
together with the ranks. Tied reductions and the optimizer step wait for the reductions before them. Deterministic: no
clock, no random numbers, and the order of every queue is that in which its rows were launched.
"""

import numpy as np

from penstock.errors import ConfigError, ScheduleError, described
from penstock.ir.collectives import LOADS_DATA
from penstock.ir.deps import deciding, predecessors
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import DataWait, Floats, Timeline
from penstock.simulation.channels import add_messages
from penstock.simulation.collectives import add_barriers, add_launched
from penstock.simulation.costs.costs import Costs
from penstock.simulation.durations import durations_s, start_after_launch
from penstock.simulation.queues import Queues


def simulate(table: Schedule | Program, costs: Costs, *, compiled: bool = False) -> Timeline:
    """Predict the timeline of a program (a schedule with its messages and collectives), or of a schedule alone.

    Computations, tied reductions and the optimizer step keep their rank busy from start to end; they are launched
    before they start. A LOAD keeps its rank waiting for as long as it takes. A send ends when its message has left, a
    receive when it has arrived, a gather or reduction when it is over. A schedule has computations alone, and its
    messages are delays between them; if launches and gathers cost nothing, computations start when they do in the
    lowered program.

    `compiled` asks for loops compiled by numba for a small table too, if many are simulated, as in a search. The first
    call may compile for some seconds.

    Raises:
        ScheduleError: if the program cannot run to its end; `penstock.check` says why.
        ConfigError: if the costs are for another number of stages, microbatches or tied groups, do not know a kind that
            the program runs, or are too large to be added.
    """
    if not isinstance(table, Schedule | Program):
        raise ConfigError(f"{described(table)}; expected a Schedule or a Program", key="table")
    require_costs(costs)
    program = Program.from_schedule(table) if isinstance(table, Schedule) else table
    duration_s, queues = durations_s(program, costs), Queues(program)
    # Each column has, per row, a row that it waits for; in the first column, the row whose result it takes. Messages,
    # collectives and barriers change these columns, and add queues of rows of their own: links and streams beside the
    # ranks.
    columns = [column.copy() for column in deciding(predecessors(program)).T]
    messages = add_messages(program, costs, columns[0], queues)
    launched = add_launched(program, costs, queues)
    barriers = add_barriers(program, columns[0], launched, queues)
    columns += launched
    if messages.posted_receives is not None:  # second, since a message has its lag after its receive is posted as well
        columns.insert(1, messages.posted_receives)
    num_lagged = 1 if messages.posted_receives is None else 2
    times = queues.walk(columns, duration_s, messages.lag_s, num_lagged=num_lagged, compiled=compiled)
    if not times.is_complete:
        raise ScheduleError(f"{program.name}: the program cannot run to its end; check it before simulating")
    if not np.isfinite(times.end.max(initial=0.0)):
        raise costs.error("they add up to more seconds than a number can hold; give smaller ones", "costs")
    # Drop the rows of queues, and set what instructions of the program show of them.
    start_s, end_s = times.start[: program.num_instructions], times.end[: program.num_instructions]
    start_s[barriers.rows] = barriers.start_s(times.end)
    start_after_launch(program, costs, start_s)
    end_s[messages.receives] = np.maximum(end_s[messages.receives], messages.arrivals_s(times.end))
    for rows, queue_rows in queues.ended_by_queues:
        end_s[rows] = times.end[queue_rows]
    sizes = costs.stage_bytes(program.placement, program.num_microbatches)
    return Timeline(program, "predicted", start_s, end_s, sizes, data_waits=_data_waits(program, start_s, end_s))


def _data_waits(program: Program, start_s: Floats, end_s: Floats) -> tuple[DataWait, ...]:
    """Return what the LOAD rows of a program keep their ranks waiting, where they take time."""
    loads = program.rows_of(LOADS_DATA)
    loads = loads[end_s[loads] > start_s[loads]]
    columns = (program.rank_of_row, program.microbatch, start_s, end_s)
    return tuple(DataWait(*wait) for wait in zip(*(column[loads].tolist() for column in columns), strict=True))


def require_costs(costs: object) -> None:
    """Refuse anything but `Costs`. Raises: ConfigError."""
    if not isinstance(costs, Costs):
        raise ConfigError(
            f"{described(costs)}; expected Costs, such as Costs.uniform() or LayerCosts(...).of_stages(split)",
            key="costs",
        )
