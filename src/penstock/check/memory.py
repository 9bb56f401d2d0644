"""Proof 4: what is alive stays within the limits, and no slot is overwritten while alive.

That every buffer is freed needs no look of its own: every F has its backward, every message its send and its consumer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.check.channels import Messages
from penstock.check.order import Actions
from penstock.check.report import Findings, Subject, first_of_each
from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.ir.live import alive, live_activations, live_bytes, peaks
from penstock.ir.program import Program

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


def check_activations(subject: Subject, limits: Limits, findings: Findings) -> list[int]:
    """Prove the limit in counts; return the peak of each rank."""
    live = live_activations(subject.table)
    if limits.num_activations is not None:
        _check_limit(live, limits.num_activations, "activation", "memory_limit", findings)
    return peaks(subject.table, live)


def check_bytes(subject: Subject, limits: Limits, findings: Findings) -> list[int] | None:
    """Prove the limit in bytes; return the peak of each rank, None where sizes are unknown.

    Without `weight_context_bytes`, a weight context is taken to be as large as the activation.

    Raises:
        ConfigError: if a limit is given without sizes, or the number of values does not fit.
    """
    if limits.activation_bytes is None:
        if limits.num_bytes is not None:
            raise ConfigError("a limit in bytes needs activation_bytes; give its size", key="memory_limit_bytes")
        return None
    num_stages = subject.table.num_stages
    saved = _spread(limits.activation_bytes, num_stages, "activation_bytes", "stage")
    context = limits.weight_context_bytes
    contexts = saved if context is None else _spread(context, num_stages, "weight_context_bytes", "stage")
    live = live_bytes(subject.table, saved, contexts)
    if limits.num_bytes is not None:
        _check_limit(live, limits.num_bytes, "byte", "memory_limit_bytes", findings)
    return peaks(subject.table, live)


def _spread(value: int | Sequence[int], count: int, key: str, word: str) -> NDArray[np.int64]:
    """[count] one value for each, or the values as given."""
    values = np.full(count, value) if isinstance(value, int) else np.asarray(value, np.int64)
    if values.shape != (count,):
        raise ConfigError(f"{len(values)} values for {count} {word}s; give one, or one per {word}", key=key)
    return values.astype(np.int64)


def _check_limit(live: NDArray[np.int64], limit: PerRank, unit: str, key: str, findings: Findings) -> None:
    subject = findings.subject
    limits = _spread(limit, subject.table.num_ranks, key, "rank")
    over = np.flatnonzero(live > limits[subject.rank])
    for row in first_of_each(subject.rank[over], over):
        rank = int(subject.rank[row])
        count = int(live[row])
        findings.add(
            row,
            f"needs {count} {unit}{'s' if count > 1 else ''} alive at once; the limit of rank {rank} is {limits[rank]}",
            "Run a backward before it, take a schedule with fewer forwards in flight, or raise the limit",
        )


def count_messages_alive(subject: Subject, messages: Messages) -> Pool:
    """Count the messages that wait in buffers."""
    table = subject.table
    received = alive(table, _marks(subject, messages.receive), _marks(subject, messages.consumer))
    unsent = alive(table, _marks(subject, messages.producer), _marks(subject, messages.send))
    return Pool(peaks(table, received), peaks(table, unsent))


def _marks(subject: Subject, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    marks: NDArray[np.int64] = np.bincount(rows, minlength=subject.num_rows)
    return marks


def check_slots(subject: Subject, actions: Actions, messages: Messages, findings: Findings) -> None:
    """Prove that whatever uses a slot is done with it before the next one takes it, in each rank's three pools."""
    program = subject.table
    assert isinstance(program, Program)
    begin, end = _activation_lives(actions, program, findings)
    _check_pool("the activation of", begin, end, begin, findings)
    _check_pool("the message of", messages.receive, messages.consumer, messages.receive, findings)
    _check_pool("the unsent result of", messages.producer, messages.send, messages.send, findings)


def _activation_lives(
    actions: Actions, program: Program, findings: Findings
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last row of every activation; a backward that looks into another slot is a finding."""
    schedule = actions.schedule
    shape = (schedule.num_stages, schedule.num_microbatches, schedule.num_slices)
    key = np.ravel_multi_index((schedule.stage, schedule.microbatch, schedule.slice), shape)
    forwards = np.flatnonzero(schedule.kind == Kind.FORWARD)
    where = np.zeros(int(np.prod(shape)), np.int64)
    where[key[forwards]] = actions.row[forwards]
    made_by = where[key]
    for action in np.flatnonzero(program.slot[made_by] != program.slot[actions.row]).tolist():
        row, forward = int(actions.row[action]), int(made_by[action])
        mine, theirs = int(program.slot[row]), int(program.slot[forward])
        place = findings.subject.place(forward, seen_from=row)
        findings.add(row, f"reads slot {mine}; {place} saved its activation in slot {theirs}", f"Give it slot {theirs}")
    if schedule.is_forward_only:
        return actions.row[forwards], actions.row[forwards]
    frees = (schedule.kind == Kind.BACKWARD) | (schedule.kind == Kind.BACKWARD_WEIGHT)
    return made_by[frees], actions.row[frees]


def _check_pool(
    what: str, begin: NDArray[np.int64], end: NDArray[np.int64], named_by: NDArray[np.int64], findings: Findings
) -> None:
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
