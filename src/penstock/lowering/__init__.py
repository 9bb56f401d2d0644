"""Lowering: from a schedule to the program that ranks run, one pass a file.

Each pass takes a valid program and returns a new valid one. They run in the order of the tuples below: messages,
receives ahead where the transport lets them, reductions, the optimizer step and offloads if asked for, buffers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from penstock.errors import ConfigError, described
from penstock.ir.linear_extension import Starts
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.transports import COALESCED, find_transports
from penstock.lowering.add_messages import add_messages
from penstock.lowering.add_offloads import add_offloads
from penstock.lowering.add_optimizer_step import add_optimizer_step
from penstock.lowering.add_reductions import add_reductions
from penstock.lowering.assign_slots import assign_slots
from penstock.lowering.post_receives_ahead import post_receives_ahead

Pass = Callable[[Program], Program]

REDUCTIONS: tuple[Pass, ...] = (add_reductions,)
STEP: tuple[Pass, ...] = (add_optimizer_step,)
BUFFERS: tuple[Pass, ...] = (assign_slots,)


def lower(
    schedule: Schedule,
    transport: str = "posted",
    *,
    tied_groups: Sequence[Sequence[int]] = (),
    optimizer_step: bool = False,
    offload: Iterable[int] = (),
    start: Starts | None = None,
) -> Program:
    """Make the program of a schedule: messages, gradient reductions, on request optimizer step and offloads, buffers.

    Whatever feasible order the schedule has, the result passes `penstock.check` under the named `transport`. For
    `coalesced` (and `all`) no receive is posted ahead, and it passes under every one; the others share one program.
    `tied_groups` are groups of stages that hold copies of one parameter, at most one of each rank; `offload` are the
    stages that move what they keep of a forward to the host until shortly before its backward; `start` are the starts
    of the schedule's untimed walk, if known.

    Raises:
        ConfigError: for anything but a schedule, an unknown transport, or a stage in `offload` that does not exist.
        ScheduleError: if the schedule cannot run to its end, if a tied group names a stage that does not exist, or two
            stages of one rank, and if stages without a backward shall offload.
    """
    if not isinstance(schedule, Schedule):
        hint = " that is not lowered yet" if isinstance(schedule, Program) else ""
        raise ConfigError(f"{described(schedule)}; expected a Schedule{hint}", key="schedule")
    groups = tuple(tuple(sorted(set(group))) for group in tied_groups)
    program = Program.from_schedule(schedule, tied_groups=groups)
    in_groups = COALESCED in find_transports(transport)
    messages: tuple[Pass, ...] = (partial(add_messages, start=start, in_groups=in_groups),)
    if not in_groups:
        messages += (post_receives_ahead,)
    offloads: tuple[Pass, ...] = (partial(add_offloads, stages=offload),)
    for apply in (*messages, *REDUCTIONS, *(STEP if optimizer_step else ()), *offloads, *BUFFERS):
        program = apply(program)
    return program


__all__ = [
    "add_messages",
    "add_offloads",
    "add_optimizer_step",
    "add_reductions",
    "assign_slots",
    "lower",
    "post_receives_ahead",
]
