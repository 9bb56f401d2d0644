"""Lowering: from a schedule to the program that ranks run, one pass a file.

Each pass takes a valid program and returns a new valid one. They run in the order of the tuple in `lower`: messages,
receives ahead where the transport lets them, gathers of sharded weights if asked for, reductions, the optimizer step
and offloads if asked for, buffers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.errors import ConfigError, described, require_choice
from penstock.ir.linear_extension import Starts
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.transports import COALESCED, find_transports
from penstock.lowering.add_barriers import add_barriers
from penstock.lowering.add_loads import add_loads
from penstock.lowering.add_messages import add_messages
from penstock.lowering.add_offloads import add_offloads
from penstock.lowering.add_optimizer_step import add_optimizer_step
from penstock.lowering.assign_slots import assign_slots
from penstock.lowering.coalesce_messages import coalesce_messages
from penstock.lowering.place_gathers import place_gathers
from penstock.lowering.place_reductions import place_reductions
from penstock.lowering.post_receives_ahead import post_receives_ahead
from penstock.lowering.post_receives_late import post_receives_late

Pass = Callable[[Program], Program]
StageGroups = Sequence[Sequence[int]]
"""Groups of stages, by their numbers."""

NONE, OPTIMIZER, FULL = SHARDS = ("none", "optimizer", "full")
"""The ways to shard weights, gradients and optimizer state among replicas: none; a rank gathers the weights of all its
stages for a whole step; it gathers those of few stages at a time."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The arguments of `lower` that say how a program is sharded."""

    shard: str = NONE
    residency: int | None = 2
    look_ahead: int = 1
    units: tuple[tuple[int, ...], ...] = ()
    aligned: bool = False

    @property
    def most_whole(self) -> int | None:
        """The most stages of a rank that may be whole at once; None where all may."""
        return self.residency if self.shard == FULL else None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that place gathers. Raises: ConfigError, where there is no such way to shard."""
        require_choice("shard", self.shard, SHARDS)
        if self.shard == NONE:
            return ()
        gathers = partial(place_gathers, residency=self.most_whole, look_ahead=self.look_ahead, aligned=self.aligned)
        return (gathers,)


NOT_SHARDED = Sharding()


def lower(
    schedule: Schedule,
    transport: str = "posted",
    *,
    tied_groups: StageGroups = (),
    optimizer_step: bool = False,
    offload: Iterable[int] = (),
    shard: str = NONE,
    residency: int | None = 2,
    look_ahead: int = 1,
    units: StageGroups = (),
    aligned: bool = False,
    loads: bool = False,
    barriers: bool = False,
    start: Starts | None = None,
) -> Program:
    """Make the program of a schedule, which also says when messages travel, gradients are reduced and buffers used.

    On request it has gathers of sharded weights, an optimizer step, and offloads of activations to the host. The
    result passes `penstock.check` under the model of messages that `transport` names, whatever the order of the
    schedule. Under `posted`, `rendezvous` and `pair_fifo` the program is the same, with receives posted ahead of their
    use; under `coalesced` and `all` no receive is posted ahead, and the program passes under all models.

    `tied_groups` are groups of stages that hold copies of one parameter, at most one stage of each rank. `offload` are
    stages whose activations are on the host until shortly before their backward. `start` are the starts of the
    schedule's actions in an untimed walk (`ir.linear_extension`), if the caller knows them.

    `shard="full"` gathers the weights of a stage for as long as they are used: at most `residency` stages of a rank are
    whole at once (None: all), and a gather starts `look_ahead` computations before its first use, if there is room.
    Whole gradients are reduced before their stage is dropped. `shard="optimizer"` gathers each stage once and keeps it,
    without regard to `residency`; its gradients are reduced once behind its last backward, and then it is dropped.
    `units` are groups of stages of one rank that share a parameter; each is gathered, reduced and dropped as one stage.
    With `aligned`, gathers start earlier and reductions later, so that those of different ranks start together.

    With `loads`, the stages at the ends of a route load their part of a microbatch right before its forward. Without,
    a rank loads what it needs while it would wait for a message.

    With `barriers`, all ranks wait for each other after every step of an untimed walk, in which a whole backward takes
    two units and all else one. No receive is posted ahead then.

    Raises:
        ConfigError: for anything but a schedule, an unknown transport or `shard`, a stage in `offload` that does not
            exist, a `residency` below 1, or below 2 with overlapped pairs, and a `look_ahead` below 0.
        ScheduleError: if the schedule cannot run to its end, if a tied group names a stage that does not exist, or two
            stages of one rank, if a unit names stages of several ranks, and if stages without a backward shall offload.
    """
    if not isinstance(schedule, Schedule):
        hint = " that is not lowered yet" if isinstance(schedule, Program) else ""
        raise ConfigError(f"{described(schedule)}; expected a Schedule{hint}", key="schedule")
    groups = tuple(tuple(sorted(set(group))) for group in tied_groups)
    gather_passes = Sharding(shard, residency, look_ahead, aligned=aligned).passes
    sorted_units = tuple(tuple(sorted(set(unit))) for unit in units) if gather_passes else ()
    program = Program.from_schedule(schedule, tied_groups=groups, units=sorted_units)
    in_groups = barriers or COALESCED in find_transports(transport)
    # Each pass takes a valid program and returns a valid one.
    passes: tuple[Pass, ...] = (
        partial(add_messages, start=start, in_groups=in_groups),
        *(() if in_groups else (post_receives_ahead,)),
        *((partial(add_barriers, start=start),) if barriers else ()),
        *gather_passes,
        partial(place_reductions, aligned=aligned),
        *((add_optimizer_step,) if optimizer_step else ()),
        partial(add_offloads, stages=offload),
        *((add_loads,) if loads else ()),
        assign_slots,
    )
    for lowering_pass in passes:
        program = lowering_pass(program)
    return program


__all__ = [
    "FULL",
    "NONE",
    "NOT_SHARDED",
    "OPTIMIZER",
    "SHARDS",
    "Sharding",
    "add_barriers",
    "add_loads",
    "add_messages",
    "add_offloads",
    "add_optimizer_step",
    "assign_slots",
    "coalesce_messages",
    "lower",
    "place_gathers",
    "place_reductions",
    "post_receives_ahead",
    "post_receives_late",
]
