"""The same order with forwards that run again: their stages keep inputs only, for less memory and more work.

    0F0 0F1 0B0 0B1  ->  0F0 0F1 0R0 0B0 0R1 0B1

R is right before its backward, so that at most one activation of a stage is there twice as long as it must be. It
waits for nothing from other ranks, and fills the time in which the gradient is on its way.
"""

from collections.abc import Iterable

import numpy as np

from penstock.errors import ConfigError, described
from penstock.ir.deps import NONE, index_rows
from penstock.ir.hot import Bools
from penstock.ir.operations import RUNS_AUTOGRAD, Kind, Op
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table


def with_recompute(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """Return the schedule with each forward of some stages, by default of all, run again before its backward.

    Forwards that run again already do so once; before an overlapped pair, both members wait for it. A
    forward-only schedule stays as it is.

    Raises:
        ConfigError: for anything but a schedule, and for a stage that it does not have.
    """
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"{described(schedule)}; expected a Schedule", key="schedule")
    chosen = chosen_stages(schedule, range(schedule.num_stages) if stages is None else stages, key="stages")
    runs_again = index_rows(schedule).plane(Op.RECOMPUTE) != NONE
    backwards = schedule.rows_of(RUNS_AUTOGRAD)
    stage_of = schedule.stage[backwards]
    has_recompute = runs_again[stage_of, schedule.microbatch[backwards], schedule.slice[backwards]]
    backwards = backwards[chosen[stage_of] & ~has_recompute]
    if not len(backwards):
        return schedule
    is_second = np.append(False, schedule.joined[:-1])
    places = backwards - is_second[backwards]
    return schedule.with_inserted(Kind.RECOMPUTE, backwards, places, name=f"{schedule.name} (recomputed)")


def chosen_stages(table: Table, stages: Iterable[int], *, key: str) -> Bools:
    """[num_stages] which stages are among those given. Raises: ConfigError, for one that the table does not have."""
    chosen = np.zeros(table.num_stages, np.bool_)
    expected = f"expected stages from 0 to {table.num_stages - 1}"
    if not isinstance(stages, Iterable):
        raise ConfigError(f"{described(stages)}; {expected}, such as [0]", key=key)
    for stage in stages:
        if isinstance(stage, bool) or not isinstance(stage, int | np.integer):
            raise ConfigError(f"{described(stage)} is no stage; {expected}", key=key)
        if not 0 <= stage < table.num_stages:
            raise ConfigError(f"stage {stage} of {table.name}; {expected}", key=key)
        chosen[stage] = True
    return chosen
