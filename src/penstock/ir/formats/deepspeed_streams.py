"""The instructions that DeepSpeed's pipeline engine would run for a schedule: of every rank, step by step.

In training, forwards and backwards of a rank take steps of opposite parity. An action takes the first step that is left
for it; its result is sent in the step after it, and there it is received. A schedule that does not keep in step like
this is refused. So all ranks can wait for each other after every step. DeepSpeed computes these steps from the numbers
of stages and microbatches; here they follow from the order of the actions, and so do the buffers.

A buffer is the microbatch modulo their number, which is as large as the oldest microbatch in them asks for, at least 2.
DeepSpeed sends a gradient before it receives the next activation. Once it received first (`TRAIN_OLD`), which takes one
buffer more.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from penstock.ir.deps import NONE, predecessors
from penstock.ir.formats.cells import cannot_express, describe_placement, require_whole_actions
from penstock.ir.hot import Bools, Int64s
from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints
from penstock.ir.walk import walk


class Listing(Enum):
    """Which of DeepSpeed's classes lists the instructions."""

    TRAIN = "TrainSchedule"
    TRAIN_OLD = "TrainSchedule (old)"
    INFERENCE = "InferenceSchedule"
    DATA_PARALLEL = "DataParallelSchedule"


Steps = list[list[str]]
"""The instructions of each step, such as `F0`: a code and the buffer."""

SEQUENTIAL = "sequential"
"""The name of what is listed without a pipeline on one rank, where 1F1B has the same order."""

_STREAMS = "DeepSpeed's streams"
_refusal = partial(cannot_express, _STREAMS)
_AT_THE_END = {Listing.INFERENCE: (), Listing.DATA_PARALLEL: ("RDG", "OPT")}


@dataclass(frozen=True, slots=True)
class Stream:
    """The instructions of one rank."""

    num_buffers: int
    steps: Steps


def streams(schedule: Schedule, listing: Listing) -> list[Stream]:
    """Return what each rank runs. Raises: ConfigError, if such streams cannot express the schedule."""
    _refuse_other_forms(schedule, listing)
    step = _steps_in_turn(schedule) if listing is Listing.DATA_PARALLEL else _steps(schedule, listing)
    return [_stream(schedule, listing, rank, step) for rank in range(schedule.num_ranks)]


def listing_of(schedule: Schedule, *, old: bool) -> Listing:
    """Choose a class: forwards alone are for inference, and `sequential` on one rank is no pipeline."""
    if schedule.is_forward_only:
        return Listing.INFERENCE
    if schedule.num_ranks == 1 and schedule.name == SEQUENTIAL:
        return Listing.DATA_PARALLEL
    return Listing.TRAIN_OLD if old else Listing.TRAIN


def _refuse_other_forms(schedule: Schedule, listing: Listing) -> None:
    placement = schedule.placement
    if placement.rank_of_stage != tuple(range(schedule.num_ranks)) or len(placement.routes) > 1:
        raise _refusal(describe_placement(schedule), "stage s on rank s")
    require_whole_actions(schedule, _STREAMS)
    microbatches = np.arange(schedule.num_microbatches)
    backwards = microbatches[:0] if listing is Listing.INFERENCE else microbatches
    for rank, rows in enumerate(schedule.ranks):
        is_backward, microbatch = schedule.kind[rows] == Kind.BACKWARD, schedule.microbatch[rows]
        if not np.array_equal(microbatch[~is_backward], microbatches):
            raise _refusal(f"the forwards of rank {rank} are in another order", "microbatch 0, then 1, and so on")
        if not np.array_equal(np.sort(microbatch[is_backward]), backwards):
            expected = f"{len(backwards)}, at most one of each microbatch"
            raise _refusal(f"rank {rank} has {is_backward.sum()} backwards", expected)


def _steps_in_turn(schedule: Schedule) -> Int64s:
    """[num_actions] the step of every action where each step is F and B of one microbatch."""
    num_microbatches = schedule.num_microbatches
    in_turn = np.array_equal(schedule.microbatch, np.repeat(np.arange(num_microbatches), 2)) and np.array_equal(
        schedule.kind, np.tile([Kind.FORWARD, Kind.BACKWARD], num_microbatches)
    )
    if schedule.num_ranks > 1 or not in_turn:
        raise _refusal("it is listed without a pipeline", "one rank that runs F and B in turn")
    return schedule.microbatch.astype(np.int64)


def _steps(schedule: Schedule, listing: Listing) -> Int64s:
    """[num_actions] the step of every action of a pipeline."""
    duration = np.ones(schedule.num_actions)
    if listing is not Listing.INFERENCE:
        # Two actions of one kind stand two steps apart: so all forwards of a rank keep one parity.
        duration[:-1] += schedule.kind[:-1] == schedule.kind[1:]
    predecessor_rows = predecessors(schedule)
    # A result can be used one step after its action began, however long the rank is busy.
    lag = 1 - duration[predecessor_rows]
    times = walk(schedule.offsets, predecessor_rows, schedule.joined, duration, lag=lag)
    if not times.is_complete:
        raise _refusal("it cannot run to its end", "an order that `penstock check` proves")
    rows = np.flatnonzero(predecessor_rows[:, 0] != NONE)
    late = rows[times.start[rows] != times.start[predecessor_rows[rows, 0]] + 1]
    if len(late):
        row = int(late[0])
        problem = (
            f"{schedule.action(row)} cannot run in the step after {schedule.action(int(predecessor_rows[row, 0]))}"
        )
        raise _refusal(problem, "every result to be used in the step after it")
    return times.start.astype(np.int64)


def _stream(schedule: Schedule, listing: Listing, rank: int, step_of_row: Ints) -> Stream:
    rows = schedule.ranks[rank]
    is_backwards, microbatch = schedule.kind[rows] == Kind.BACKWARD, schedule.microbatch[rows]
    steps_of_rank = step_of_row[rows]
    num_buffers = _num_buffers(is_backwards, microbatch, steps_of_rank, listing)
    steps: Steps = [[] for _ in range(int(step_of_row.max()) + 1)]
    is_first, is_last = rank == 0, rank == schedule.num_ranks - 1
    columns = (is_backwards, microbatch % num_buffers, steps_of_rank)
    for is_backward, buffer, step in zip(*(column.tolist() for column in columns), strict=True):
        receive, compute, send = ("RG", "B", "SG") if is_backward else ("RA", "F", "SA")
        steps[step].append(f"{compute}{buffer}")
        if not is_backward and (is_first or is_last):
            steps[step].append(f"L{buffer}")
        if not (is_last if is_backward else is_first):
            steps[step].append(f"{receive}{buffer}")
        if not (is_first if is_backward else is_last):
            steps[step + 1].append(f"{send}{buffer}")
    place = {code: index for index, code in enumerate(_codes_in_order(listing, rank))}
    ordered = [sorted(step, key=lambda text: place[text.rstrip("0123456789")]) for step in steps]
    ordered[-1] += _AT_THE_END.get(listing, ("RTG", "RDG", "OPT"))
    return Stream(num_buffers, ordered)


def _codes_in_order(listing: Listing, rank: int) -> list[str]:
    """How the instructions of one step follow each other; no step has both F and B."""
    if listing is Listing.INFERENCE:
        # Of two neighboring ranks one sends first and the other receives first: else both wait for the other.
        return ["L", *(("RA", "SA") if rank % 2 else ("SA", "RA")), "F"]
    if listing is Listing.TRAIN_OLD:
        return ["RA", "SG", "SA", "RG", "L", "F", "B"]
    return ["SG", "RA", "RG", "SA", "L", "F", "B"]


def _num_buffers(is_backward: Bools, microbatch: Ints, step: Ints, listing: Listing) -> int:
    """As many as there are from the oldest microbatch that is still in a buffer to the newest."""
    if listing in (Listing.INFERENCE, Listing.DATA_PARALLEL):
        return 2 if listing is Listing.INFERENCE else 1
    backward_step = np.zeros(int(is_backward.sum()), np.int64)
    backward_step[microbatch[is_backward]] = step[is_backward]
    forward_step = step[~is_backward]
    # Where a step receives before it sends, the gradient of the backward one step ago is still in its buffer.
    last_step_in_buffer = forward_step - 1 if listing is Listing.TRAIN_OLD else forward_step
    oldest = np.searchsorted(np.maximum.accumulate(backward_step), last_step_in_buffer)
    return max(2, int((np.arange(len(forward_step)) - oldest).max()) + 1)
