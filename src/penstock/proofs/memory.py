"""Proof 4: what is alive stays within the limits, and no slot is overwritten while alive.

That every buffer is freed needs no look of its own: every F has its backward, every message its send and its consumer.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

import numpy as np

from penstock.errors import ConfigError, count_of, described, shortened
from penstock.ir.deps import NONE, RowIndex, identities_of
from penstock.ir.hot import Array, Hot, Int32s, Int64s, blocks
from penstock.ir.live import StageBytes, live_bytes, one_each, peak_alive, peak_bytes
from penstock.ir.operations import BEGINS_KEEPING, ENDS_KEEPING, IS_RECEIVE, IS_SEND, NAMES_SLOT
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.ir.units import BYTES_OF_UNIT
from penstock.ir.whole import num_whole, peak_whole
from penstock.placement import Placement
from penstock.proofs.channels import Messages, join_messages
from penstock.proofs.report import Subject, first_of_each

POOL = IS_RECEIVE + np.int8(2) * IS_SEND
"""[NUM_OPS] by the operation whose row holds the number of a slot: 0 activations, 1 received, 2 unsent messages."""
UNITS = {"bytes": 1, "b": 1} | BYTES_OF_UNIT
"""Bytes by unit, in small letters."""
LimitUnit = Literal["bytes", "activations", "microbatches"]
COUNTED: dict[str, LimitUnit] = {
    "activation": "activations",
    "activations": "activations",
    "microbatch": "microbatches",
    "microbatches": "microbatches",
}
SPELLINGS = '"20GiB" or a number of bytes, with costs; or "12 activations" or "6 microbatches"'

_LIMIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class CostsOfStages(Protocol):
    """The method that is asked of costs."""

    def stage_bytes(self, placement: Placement, num_microbatches: int) -> StageBytes:
        """Return what the stages of a placement make and keep."""
        ...


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a rank may hold: bytes, activations by number, or what microbatches leave on a rank."""

    amounts: tuple[int | Fraction, ...]
    """The amounts of the ranks, or one for all."""
    unit: LimitUnit
    text: str
    """The limit as the user wrote it."""

    @classmethod
    def read(cls, limit: Any, key: str = "memory_limit") -> "Limit":
        """Read `"20GiB"`, a number of bytes, `"12 activations"` or `"6 microbatches"`; or a list of such, one per rank.

        Raises:
            ConfigError: for an unknown unit, anything but a number of 1 or more, and a list of several units.
        """
        if isinstance(limit, Limit):
            return limit
        plain = limit.tolist() if isinstance(limit, (np.ndarray, np.generic)) else limit
        entries = plain if isinstance(plain, (list, tuple)) else [plain]
        amounts = [_read_amount(entry, key) for entry in entries]
        if len({unit for _, unit in amounts}) != 1:
            raise ConfigError(f"{described(limit)}; give {SPELLINGS}, for all ranks alike or per rank", key=key)
        return cls(tuple(amount for amount, _ in amounts), amounts[0][1], str(plain))

    @property
    def in_bytes(self) -> bool:
        return self.unit == "bytes"

    def of_ranks(self, num_ranks: int, parts_per_rank: Fraction) -> Int64s:
        """[num_ranks] the limit of each rank: bytes, or activations.

        A microbatch leaves an activation for each stage and slice that a rank runs of it, `parts_per_rank` in the mean.

        Raises:
            ConfigError: if there are neither as many limits as ranks nor a single one.
        """
        if len(self.amounts) not in (1, num_ranks):
            problem = f"{len(self.amounts)} values for {num_ranks} ranks; give one, or one per rank"
            raise ConfigError(problem, key="memory_limit")
        factor = parts_per_rank if self.unit == "microbatches" else 1
        largest = int(np.iinfo(np.int64).max)
        limits = [min(math.floor(amount * factor), largest) for amount in self.amounts]
        return np.resize(np.array(limits, np.int64), num_ranks)

    def require_sizes(self, activation_bytes: Sequence[float] | Array | None, key: str = "memory_limit") -> None:
        """Refuse bytes where no one knows how large activations are; None: there are no costs. Raises: ConfigError."""
        if self.in_bytes and (activation_bytes is None or not any(activation_bytes)):
            lack = "there are no costs" if activation_bytes is None else "the costs have no activation_bytes"
            raise ConfigError(
                f"{self} is a number of bytes, but {lack} to say how large activations are. Give costs with "
                'activation_bytes, which penstock profile RUN.toml measures, or count: "6 microbatches"',
                key=key,
            )

    def __str__(self) -> str:
        return self.text


def _read_amount(entry: Any, key: str) -> tuple[int | Fraction, LimitUnit]:
    """Return the number of one limit and its unit. Raises: ConfigError."""
    if isinstance(entry, int) and not isinstance(entry, bool):
        number, unit = Fraction(entry), "bytes"
    else:
        match = _LIMIT.fullmatch(entry) if isinstance(entry, str) else None
        if match is None:
            shown = shortened(entry) if isinstance(entry, str) else described(entry)
            raise ConfigError(f"{shown}; give {SPELLINGS}", key=key)
        number, unit = Fraction(match[1]), match[2].lower() or "bytes"
        if unit not in UNITS and unit not in COUNTED:
            units = ", ".join((*UNITS, "activations"))
            raise ConfigError(f"{shortened(entry)} has no known unit; expected one of {units} or microbatches", key=key)
    counts = COUNTED.get(unit, "bytes")
    amount = number if counts == "microbatches" else math.floor(number * UNITS.get(unit, 1))
    if amount <= 0:
        raise ConfigError(f"{shortened(entry)}; give a limit of 1 or more", key=key)
    return amount, counts


@dataclass(frozen=True, slots=True)
class Demand:
    """Demands on the memory of a table: a limit, and the costs that say how large values are."""

    limit: Limit | None = None
    costs: CostsOfStages | None = None
    residency: int | None = None
    """The most stages of a rank that may be whole at once, where they are sharded; None: any number."""

    @classmethod
    def of(cls, memory_limit: Any, costs: CostsOfStages | None, residency: int | None = None) -> "Demand":
        """Read a limit, if there is one; raises ConfigError as `Limit.read` does."""
        return cls(None if memory_limit is None else Limit.read(memory_limit), costs, residency)

    def sizes(self, table: Table) -> StageBytes | None:
        """Return what the stages of a table make and keep, if costs say so.

        Raises:
            ConfigError: for anything but costs per stage, costs for another number of stages or microbatches, and
                costs that do not have what a limit in bytes needs.
        """
        costs, sizes = self.costs, None
        if costs is not None:
            if not hasattr(costs, "stage_bytes"):
                hint = "; add them up by costs.of_stages([layers per stage])" if hasattr(costs, "of_stages") else ""
                raise ConfigError(f"expected Costs, got {type(costs).__name__}{hint}", key="costs")
            sizes = costs.stage_bytes(table.placement, table.num_microbatches)
        if self.limit is not None:
            self.limit.require_sizes(None if sizes is None else sizes.activation)
        return sizes


NO_DEMAND = Demand()


def check_limit(subject: Subject, counts: list[int], sizes: StageBytes | None, limit: Limit | None) -> list[int] | None:
    """Prove that no row needs more than the limit of its rank; static bytes count in a limit in bytes.

    `counts` are the peaks of activations per rank. Return the peaks of bytes, None where sizes are unknown.

    Raises:
        ConfigError: if the limit does not fit the table.
    """
    table = subject.table
    if limit is not None and not limit.in_bytes:
        _prove_limit(subject, limit, counts, lambda: live_bytes(table, one_each(table)))
    if sizes is None:
        return None
    static, num_bytes = sizes.static_of_ranks(table.placement), peak_bytes(table, sizes)
    if limit is not None and limit.in_bytes:
        _prove_limit(subject, limit, num_bytes + static, lambda: live_bytes(table, sizes) + static[subject.rank])
    return num_bytes


def _prove_limit(subject: Subject, limit: Limit, peaks: Sequence[int] | Int64s, live: Callable[[], Int64s]) -> None:
    """Add a violation at the first row of each rank that needs more than its limit.

    `live` returns [num_rows] the amount that is alive while each row runs, and `peaks` are its maxima per rank.
    """
    table = subject.table
    limits = limit.of_ranks(table.num_ranks, table.parts_per_rank)
    if (limits >= peaks).all():  # the column of all rows is made only where one of them is over its limit
        return
    rank, held_amounts = subject.rank, live()
    over = np.flatnonzero(held_amounts > limits[rank])
    for index in first_of_each(rank[over], over):
        unit = "byte" if limit.in_bytes else "activation"
        subject.add(
            index,
            f"needs {count_of(int(held_amounts[index]), unit)} alive at once; the limit of rank {rank[index]} is "
            f"{limits[rank[index]]}{f' ({limit})' * (limit.unit == 'microbatches')}",
            "Run a backward before it, take a schedule with fewer forwards in flight, or raise the limit",
        )


def check_residency(subject: Subject, residency: int | None) -> list[int] | None:
    """Prove that no more stages of a rank are whole at once than may be, of those that are gathered; None: any number.

    0UNSHARD 0F0 1UNSHARD 1F0 0RESHARD 1RESHARD      two are whole while 1F0 runs

    Return the most of each rank, those being gathered included; None where none is gathered.
    """
    program = subject.program
    peaks = peak_whole(program)
    if peaks is not None and residency is not None and max(peaks) > residency:
        num_whole_units = num_whole(program)
        over = np.flatnonzero(num_whole_units > residency)
        for row in first_of_each(program.rank_of_row[over], over):
            rank, num_units = program.rank_of_row[row], num_whole_units[row]
            problem = f"makes {num_units} stages whole at once; rank {rank} may have {residency}"
            subject.add(row, problem, "Reshard one of them before it, or raise residency")
    return peaks


def count_messages_alive(subject: Subject, messages: Sequence[Messages]) -> tuple[list[int], list[int]]:
    """Return the peaks per rank of messages that have arrived and are not consumed, and that are made and not sent."""
    is_receive, is_consumer, is_producer, is_send = np.zeros((4, subject.table.num_rows), np.bool_)
    for part in messages:
        is_receive[part.receive] = is_consumer[part.consumer] = True
        is_producer[part.producer] = is_send[part.send] = True
    return peak_alive(subject.table, is_receive, is_consumer), peak_alive(subject.table, is_producer, is_send)


def check_slots(subject: Subject, rows: RowIndex, parts: Sequence[Messages]) -> None:
    """Prove that whatever uses a slot is done with it before the next one takes it, in each rank's three pools."""
    program = subject.program
    begin, end = _activation_lives(subject, rows)
    # One linear pass, as most programs are right; the sorts below are for the messages of those that are not.
    if _num_overlaps(program, begin, end, parts) == 0:
        return
    messages = join_messages(parts)
    _check_pool(subject, "the activation of", begin, end, begin)
    _check_pool(subject, "the message of", messages.receive, messages.consumer, messages.receive)
    _check_pool(subject, "the unsent result of", messages.producer, messages.send, messages.send)


def _activation_lives(subject: Subject, rows: RowIndex) -> tuple[Int32s, Int32s]:
    """Return the first and the last row of every activation; add a violation for a reader that names another slot."""
    program = subject.program
    rows_of_op = {op: rows.plane(op).reshape(-1) for op in rows.planes if NAMES_SLOT[op]}
    forward = next((op_rows for op, op_rows in rows_of_op.items() if BEGINS_KEEPING[op]), np.empty(0, np.int32))
    for part in blocks(program.num_rows):
        readers = part.start + np.flatnonzero(NAMES_SLOT[program.op[part]])
        savers = forward[identities_of(program, part)[readers - part.start]]
        for index in np.flatnonzero(program.slot[readers] != program.slot[savers]).tolist():
            row, saver = int(readers[index]), int(savers[index])
            read_slot, saved_slot = int(program.slot[row]), int(program.slot[saver])
            place = subject.place(saver, seen_from=row)
            problem = f"reads slot {read_slot}; {place} saved its activation in slot {saved_slot}"
            subject.add(row, problem, f"Give it slot {saved_slot}")
    last = forward
    for op, op_rows in rows_of_op.items():  # B before W
        if ENDS_KEEPING[op]:
            last = np.where(op_rows != NONE, op_rows, last)
    is_there = forward != NONE
    return forward[is_there], last[is_there]


def _num_overlaps(program: Program, begin: Int32s, end: Int32s, messages: Sequence[Messages]) -> int:
    """Count slots that are taken while in use; more than 0 means that there may be some."""
    # Each life is noted at one row: that of an unsent result at its end, the others at their begin.
    other_row = np.full(program.num_instructions, NONE, np.int32)
    # The two rows of a pair run together: what one frees is not free for the other.
    other_row[begin] = end + program.joined[end]
    for part in messages:
        other_row[part.receive] = part.consumer + program.joined[part.consumer]
        other_row[part.send] = part.producer
    num_slots = int(program.slot.max(initial=0)) + 1
    if num_slots > program.num_instructions or program.slot.min(initial=0) < 0:
        return 1  # no table of slots for such numbers
    last_row = np.full((3, num_slots), NONE, np.int64)
    return int(_COUNT_OVERLAPS(program.num_instructions, program.op, POOL, program.slot, other_row, last_row))


def _count_overlaps(op: Any, pool_of_op: Any, slot: Any, other_row: Any, last_row: Any) -> int:
    """Count the lives that begin in a slot before the life before them there has ended, in the order of their rows.

    `other_row` is the other end of the life that is noted at a row. `last_row` [num_pools, num_slots] is written: the
    last row of the latest life in each slot.
    """
    count = 0
    for row in range(len(op)):
        life_end = other_row[row]
        if life_end < 0:
            continue
        pool = pool_of_op[op[row]]
        begin = row
        if pool == 2:  # an unsent result begins at its maker and ends at the send
            begin, life_end = life_end, row
        # Row numbers grow from rank to rank, so entries of an earlier rank in `last_row` never count as overlaps.
        if begin <= last_row[pool, slot[row]]:
            count += 1
        last_row[pool, slot[row]] = life_end
    return count


_COUNT_OVERLAPS = Hot(_count_overlaps)


def _check_pool(subject: Subject, contents: str, begin: Int32s, end: Int32s, named_by: Int32s) -> None:
    """Prove that lives in one slot of one rank do not overlap; `named_by` are the rows that hold the slot's number."""
    program = subject.program
    # The two rows of a pair run together: what one frees is not free for the other.
    busy_until = end + program.joined[end]
    slot = program.slot[named_by].astype(np.int64)
    pool = subject.rank[begin] * (int(slot.max(initial=0)) + 1) + slot
    # Sorted by slot and begin: if any two lives in a slot overlap, so do two that are next to each other.
    order = np.argsort(pool * subject.table.num_rows + begin)
    earlier, later = order[:-1], order[1:]
    clash = (pool[earlier] == pool[later]) & (begin[later] <= busy_until[earlier])
    for first, second in zip(earlier[clash].tolist(), later[clash].tolist(), strict=True):
        row, holder, last = int(begin[second]), int(begin[first]), int(end[first])
        subject.add(
            row,
            f"overwrites slot {slot[second]}, where {contents} {subject.place(holder, seen_from=row)} lives until "
            f"{subject.place(last, seen_from=row)}",
            f"Take another slot, or wait until {subject.text(last)} has run",
        )
