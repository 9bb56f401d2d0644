"""Proof 4: what is alive stays within the limits, and no slot is overwritten while alive.

That every buffer is freed needs no look of its own: every F has its backward, every message its send and its consumer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described
from penstock.ir.deps import NONE, RowIndex
from penstock.ir.hot import Hot
from penstock.ir.live import live_bytes, peak_alive, peak_bytes
from penstock.ir.operations import IS_RECEIVE, IS_SEND, Op
from penstock.ir.program import Program
from penstock.proofs.channels import Messages, Rows
from penstock.proofs.order import Actions
from penstock.proofs.report import Findings, Subject, first_of_each

POOL = IS_RECEIVE + np.int8(2) * IS_SEND
"""[NUM_OPS] by the operation whose row holds the number of a slot: 0 activations, 1 received, 2 unsent messages."""
PerStage = int | Sequence[int]
PerRank = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rank may hold, and how large an activation is; None where there is no limit or the size is unknown."""

    num_activations: PerRank | None = None
    activation_bytes: PerStage | None = None
    weight_context_bytes: PerStage | None = None
    num_bytes: PerRank | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Peaks per rank of the messages that have arrived and are not consumed, and that are made and not sent."""

    received: list[int]
    unsent: list[int]


def check_activations(actions: Actions, limits: Limits, findings: Findings) -> list[int]:
    """Prove the limit in counts; return the peak of each rank."""
    ones = np.ones(actions.schedule.num_stages, np.int64)
    return _check_limit(actions, _Sizes(ones, ones, "activation"), limits.num_activations, "memory_limit", findings)


def check_bytes(actions: Actions, limits: Limits, findings: Findings) -> list[int] | None:
    """Prove the limit in bytes; return the peak of each rank, None where sizes are unknown.

    Without `weight_context_bytes`, a weight context is taken to be as large as the activation.

    Raises:
        ConfigError: if a limit is given without sizes, or the number of values does not fit.
    """
    if limits.activation_bytes is None:
        if limits.num_bytes is not None:
            raise ConfigError("a limit in bytes needs activation_bytes; give its size", key="memory_limit_bytes")
        return None
    num_stages = actions.schedule.num_stages
    saved = _spread(limits.activation_bytes, num_stages, "activation_bytes", "stage")
    context = limits.weight_context_bytes
    contexts = saved if context is None else _spread(context, num_stages, "weight_context_bytes", "stage")
    return _check_limit(actions, _Sizes(saved, contexts, "byte"), limits.num_bytes, "memory_limit_bytes", findings)


def _spread(value: int | Sequence[int], count: int, key: str, word: str) -> NDArray[np.int64]:
    """[count] one value for each, or the values as given."""
    values = np.asarray(value)
    if values.dtype.kind not in "iu":
        raise ConfigError(f"{described(value)}; give a whole number, or one per {word}", key=key)
    if values.ndim == 0:
        values = np.full(count, value)
    if values.shape != (count,):
        raise ConfigError(f"{len(values)} values for {count} {word}s; give one, or one per {word}", key=key)
    return values.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Per stage, what is kept after F and what of it after I, and the unit of both."""

    activation: NDArray[np.int64]
    weight_context: NDArray[np.int64]
    unit: str


def _check_limit(actions: Actions, sizes: _Sizes, limit: PerRank | None, key: str, findings: Findings) -> list[int]:
    """Prove that no action needs more than the limit of its rank; return the peak of each rank."""
    schedule = actions.schedule
    peak = peak_bytes(schedule, sizes.activation, sizes.weight_context)
    if limit is None:
        return peak
    limits = _spread(limit, schedule.num_ranks, key, "rank")
    if (limits >= peak).all():
        return peak
    live = live_bytes(schedule, sizes.activation, sizes.weight_context)
    over = np.flatnonzero(live > limits[actions.rank])
    for action in first_of_each(actions.rank[over], over):
        rank, count = int(actions.rank[action]), int(live[action])
        findings.add(
            int(actions.row[action]),
            f"needs {count} {sizes.unit}{'s' if count > 1 else ''} alive at once; "
            f"the limit of rank {rank} is {limits[rank]}",
            "Run a backward before it, take a schedule with fewer forwards in flight, or raise the limit",
        )
    return peak


def count_messages_alive(subject: Subject, messages: Messages) -> Pool:
    """Count the messages that wait in buffers."""
    marks = []
    for rows in (messages.receive, messages.consumer, messages.producer, messages.send):
        mark = np.zeros(subject.num_rows, np.bool_)
        mark[rows] = True
        marks.append(mark)
    received, consumed, made, sent = marks
    return Pool(peak_alive(subject.table, received, consumed), peak_alive(subject.table, made, sent))


def check_slots(subject: Subject, rows: RowIndex, messages: Messages, findings: Findings) -> None:
    """Prove that whatever uses a slot is done with it before the next one takes it, in each rank's three pools."""
    program = subject.table
    assert isinstance(program, Program)
    begin, end = _activation_lives(program, rows, findings)
    if _num_overlaps(program, begin, end, messages) == 0:
        return
    _check_pool("the activation of", begin, end, begin, findings)
    _check_pool("the message of", messages.receive, messages.consumer, messages.receive, findings)
    _check_pool("the unsent result of", messages.producer, messages.send, messages.send, findings)


def _activation_lives(program: Program, rows: RowIndex, findings: Findings) -> tuple[Rows, Rows]:
    """First and last row of every activation; a backward that looks into another slot is a finding."""
    forward, backward, weight = (rows.plane(op).reshape(-1) for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT))
    for reader in (rows.plane(Op.RECOMPUTE).reshape(-1), backward, weight):
        for identity in np.flatnonzero((reader != NONE) & (program.slot[reader] != program.slot[forward])).tolist():
            row, saver = int(reader[identity]), int(forward[identity])
            mine, theirs = int(program.slot[row]), int(program.slot[saver])
            place = findings.subject.place(saver, seen_from=row)
            problem = f"reads slot {mine}; {place} saved its activation in slot {theirs}"
            findings.add(row, problem, f"Give it slot {theirs}")
    is_there = forward != NONE
    last = forward if program.is_forward_only else np.where(weight != NONE, weight, backward)
    return forward[is_there], last[is_there]


def _num_overlaps(program: Program, begin: Rows, end: Rows, messages: Messages) -> int:
    """Count slots that are taken while in use; more than 0 means that there may be some."""
    # Each life is noted at one row: that of an unsent result at its end, the others at their begin.
    other_end = np.full(program.num_instructions, NONE, np.int32)
    # Two joined rows run together: what one frees is not free for the other.
    other_end[begin] = end + program.joined[end]
    other_end[messages.receive] = messages.consumer + program.joined[messages.consumer]
    other_end[messages.send] = messages.producer
    num_slots = int(program.slot.max(initial=0)) + 1
    if num_slots > program.num_instructions or program.slot.min(initial=0) < 0:
        return 1  # no table of slots for such numbers
    in_use = np.full((3, num_slots), NONE, np.int64)
    return int(_COUNT_OVERLAPS(program.num_instructions, program.op, POOL, program.slot, other_end, in_use))


def _count_overlaps(op: Any, pool_of_op: Any, slot: Any, other_end: Any, in_use: Any) -> int:
    """Look at lives one after the other; `in_use` holds per pool and slot the last row of the life before."""
    count = 0
    for row in range(len(op)):
        other = other_end[row]
        if other < 0:
            continue
        pool = pool_of_op[op[row]]
        begin = row
        if pool == 2:  # an unsent result begins at its maker and ends at the send
            begin, other = other, row
        # The rows of earlier ranks are smaller: what these have left behind is in nobody's way.
        if begin <= in_use[pool, slot[row]]:
            count += 1
        in_use[pool, slot[row]] = other
    return count


_COUNT_OVERLAPS = Hot(_count_overlaps)


def _check_pool(what: str, begin: Rows, end: Rows, named_by: Rows, findings: Findings) -> None:
    """Prove that lives in one slot of one rank do not overlap; `named_by` are the rows that hold the slot's number."""
    subject = findings.subject
    program = subject.table
    assert isinstance(program, Program)
    # Two joined rows run together: what one frees is not free for the other.
    ends = end + program.joined[end]
    slot = program.slot[named_by].astype(np.int64)
    pool = subject.rank[begin] * (int(slot.max(initial=0)) + 1) + slot
    order = np.argsort(pool * subject.num_rows + begin)
    earlier, later = order[:-1], order[1:]
    clash = (pool[earlier] == pool[later]) & (begin[later] <= ends[earlier])
    for first, second in zip(earlier[clash].tolist(), later[clash].tolist(), strict=True):
        row, holder, last = int(begin[second]), int(begin[first]), int(end[first])
        findings.add(
            row,
            f"overwrites slot {slot[second]}, where {what} {subject.place(holder, seen_from=row)} lives until "
            f"{subject.place(last, seen_from=row)}",
            f"Take another slot, or wait until {subject.text(last)} has run",
        )
