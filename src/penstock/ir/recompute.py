"""The same order with forwards that run again: their stages keep inputs only, for less memory and more work.

    0F0 0F1 0B0 0B1  ->  0F0 0F1 0R0 0B0 0R1 0B1

R is right before its backward, so that at most one activation of a stage is there twice as long as it must be. It
waits for nothing from other ranks, and fills the time in which the gradient is on its way.

A rank may have room for some activations. Where its order needs more, R takes one place of that room, and only those
forwards run again that begin while no other place is free. Of 1F1B these are the forwards that Megatron-LM checkpoints
with `num_microbatches_with_partial_activation_checkpoints`, the other places. With room for two, 0F0 keeps its
activation, 0F1 and 0F2 find no place, and 0F3 has that which 0B0 leaves:

    0F0 0F1 0F2 0B0 0F3 0B1 ...  ->  0F0 0F1 0F2 0B0 0F3 0R1 0B1 ...
"""

from collections.abc import Iterable

import numpy as np

from penstock.errors import ConfigError, described
from penstock.ir.deps import identities_of, num_identities
from penstock.ir.hot import Bools, Hot, Int32s
from penstock.ir.live import peak_activations
from penstock.ir.operations import BEGINS_KEEPING, ENDS_KEEPING, RUNS_AUTOGRAD, Kind, Op
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table


def with_recompute(
    schedule: Schedule, stages: Iterable[int] | None = None, *, activations: int | None = None
) -> Schedule:
    """Return the schedule with forwards of some stages, by default of all, run again right before their backward.

    `activations` is the number of activations, each of one stage and microbatch (or slice), for which a rank has room,
    that of R included. Only forwards that find no room run again, and on a rank that never holds more, none do. Ranks
    with whole backwards, whose stages all may run again, stay within that room. Where backwards are split, what R makes
    stays until W, beside what has found room. By default all forwards run again.

    Forwards that run again already do so once; before an overlapped pair, both members wait for it. A forward-only
    schedule stays as it is.

    Raises:
        ConfigError: for anything but a schedule, a stage that it does not have, and a number below 1.
    """
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"{described(schedule)}; expected a Schedule", key="schedule")
    if activations is not None and (not _is_whole(activations) or activations < 1):
        raise ConfigError(f"{described(activations)}; expected a whole number of 1 or more", key="activations")
    is_of_stages = chosen_stages(schedule, range(schedule.num_stages) if stages is None else stages, key="stages")
    identity = identities_of(schedule, slice(0, schedule.num_rows))
    runs_again = np.zeros(num_identities(schedule), np.bool_)
    runs_again[identity[schedule.op == Op.RECOMPUTE]] = True
    chosen = np.repeat(is_of_stages, schedule.num_microbatches * schedule.num_slices) & ~runs_again
    if activations is not None:
        chosen = _forwards_without_room(schedule, identity, runs_again, chosen, int(activations))
    backwards = schedule.rows_of(RUNS_AUTOGRAD)
    backwards = backwards[chosen[identity[backwards]]]
    if not len(backwards):
        return schedule
    is_second = np.append(False, schedule.joined[:-1])
    places = backwards - is_second[backwards]
    return schedule.with_inserted(Kind.RECOMPUTE, backwards, places, name=f"{schedule.name} (recomputed)")


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _forwards_without_room(
    schedule: Schedule, identity: Int32s, runs_again: Bools, may_run_again: Bools, num_activations: int
) -> Bools:
    """[num_identities] which forwards find no room for their activation on their rank.

    `identity` is that of each row. Identities of forwards that run again already are in `runs_again`, those of forwards
    that may in `may_run_again`.
    """
    op = schedule.op
    lacks_room, is_kept = np.zeros((2, len(runs_again)), np.bool_)
    for part, peak in zip(schedule.ranks, peak_activations(schedule), strict=True):
        if peak > num_activations:
            rows = (BEGINS_KEEPING[op[part]], ENDS_KEEPING[op[part]], schedule.joined[part], identity[part])
            num_places = num_activations - 1  # one more is for what R makes
            _FILL_ROOM(len(rows[0]), *rows, runs_again, may_run_again, is_kept, lacks_room, num_places)
    return lacks_room


def _fill_room(
    begins_keeping: Bools,
    ends_keeping: Bools,
    joined: Bools,
    identity: Int32s,
    runs_again: Bools,
    may_run_again: Bools,
    is_kept: Bools,
    lacks_room: Bools,
    num_places: int,
) -> None:
    """Walk over the rows of one rank: mark the forwards that keep their activation, and those that find no room."""
    num_kept = num_ending = 0
    for row in range(len(identity)):
        action = identity[row]
        if begins_keeping[row] and not runs_again[action]:
            if may_run_again[action] and num_kept >= num_places:
                lacks_room[action] = True
            else:
                is_kept[action] = True
                num_kept += 1
        if ends_keeping[row] and is_kept[action]:
            num_ending += 1
        if not joined[row]:  # what a row of an overlapped pair frees is there until both have ended
            num_kept -= num_ending
            num_ending = 0


_FILL_ROOM = Hot(_fill_room)


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
