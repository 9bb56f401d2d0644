"""`Program`: for every rank its instructions in order, as one immutable table; what is simulated and executed."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.formats.json_text import program_from_json, program_to_json
from penstock.ir.formats.torch_csv import program_from_csv, table_to_csv
from penstock.ir.hot import Array, Int64s
from penstock.ir.instruction import Instruction
from penstock.ir.operations import IS_IN_TORCH, IS_MESSAGE, NAMES_MICROBATCH, NUM_OPS, Op
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, Table, short_type
from penstock.placement import Placement, modules_of_ranks

_MANY = 10_000
"""Rows to insert."""
_NO_GROUPS = np.broadcast_to(np.int32(0), 1)
"""A column of zeros for any number of rows: its one entry stands for all, so it takes no memory."""


@dataclass(frozen=True, eq=False, repr=False)
class Program(Table):
    """A table of instructions; the columns mean what `Instruction` says."""

    COLUMNS = (*Table.COLUMNS, "peer", "slot", "group")
    WHAT = "instruction"

    _: KW_ONLY
    peer: Ints
    slot: Ints
    tied_groups: tuple[tuple[int, ...], ...] = ()
    """Groups of stages that hold copies of one parameter and reduce its gradient together, at most one per rank."""
    units: tuple[tuple[int, ...], ...] = ()
    """Groups of stages of one rank that share a parameter, so that they are gathered, dropped and reduced as one. Any
    other stage is a unit by itself, together with its copies on the same rank, which are one module."""
    group: Ints = field(default_factory=lambda: _NO_GROUPS)
    """Messages of a rank that follow each other and share a number above 0 are launched together; 0: launched alone."""
    omits_reductions: bool = False
    """True for a training program that leaves all reductions to whoever runs it: so other systems write some of theirs,
    and so a program is before `lowering.place_reductions`. Of all others, `penstock.check` demands every reduction."""

    def __post_init__(self) -> None:
        if isinstance(self.group, np.ndarray) and not self.group.any():
            object.__setattr__(self, "group", np.broadcast_to(_NO_GROUPS, np.shape(self.op)))
        super().__post_init__()
        self._require_groups()
        for group in self.tied_groups:
            _require_tied_group(group, self.placement)
        for unit in self.units:
            _require_unit(unit, self.placement)
        self._require_range("slot", None)
        self._require_range("peer", max(self.num_stages, len(self.tied_groups)) - 1)
        unnumbered = self.rows_of(~NAMES_MICROBATCH)
        stray = unnumbered[(self.microbatch[unnumbered] != 0) | (self.slice[unnumbered] != 0)]
        if len(stray):
            column = "microbatch" if self.microbatch[stray[0]] else "slice"
            raise self._wrong_number(int(stray[0]), column, "0, since the operation has none")
        tied = self.rows_of(np.arange(NUM_OPS) == Op.REDUCE_TIED)
        nowhere = tied[self.peer[tied] >= len(self.tied_groups)]
        if len(nowhere):
            raise self._wrong_number(int(nowhere[0]), "peer", f"of a tied group, below {len(self.tied_groups)}")

    @classmethod
    def from_schedule(
        cls,
        schedule: Schedule,
        *,
        tied_groups: tuple[tuple[int, ...], ...] = (),
        units: tuple[tuple[int, ...], ...] = (),
    ) -> "Program":
        """One compute instruction per action, nothing else."""
        return cls(
            **{field.name: getattr(schedule, field.name) for field in fields(Table)},
            # A tied reduction has the number of its group there.
            peer=schedule.stage.astype(short_type(max(schedule.num_stages, len(tied_groups))), copy=False),
            slot=np.zeros(schedule.num_rows, np.int32),
            tied_groups=tied_groups,
            units=units,
            omits_reductions=not schedule.is_forward_only,
        )

    @property
    def num_instructions(self) -> int:
        return self.num_rows

    @cached_property
    def has_groups(self) -> bool:
        """Whether some messages are launched together."""
        return bool(self.group.any())

    @cached_property
    def unit_of_stage(self) -> Int64s:
        """[num_stages] the first stage of the unit that each stage belongs to."""
        first_stage_of_unit = np.arange(self.num_stages)
        for unit in (*modules_of_ranks(self.placement), *self.units):
            members = first_stage_of_unit[list(unit)]
            first_stage_of_unit[np.isin(first_stage_of_unit, members)] = members.min(initial=self.num_stages)
        return first_stage_of_unit

    @property
    def number(self) -> Ints:
        return np.where(self.op == Op.REDUCE_TIED, self.peer, self.microbatch)

    def actions(self) -> Schedule:
        """Return the computations, in their order."""
        table_fields = {field.name: getattr(self, field.name) for field in fields(Table)}
        return Schedule(**table_fields | self.selected(self.compute_rows(), Table.COLUMNS))

    def instruction(self, row: int) -> Instruction:
        """Return one row as a value."""
        return Instruction(
            Op(int(self.op[row])),
            *(int(getattr(self, name)[row]) for name in ("stage", "microbatch", "slice", "peer", "slot")),
        )

    row = instruction

    def __getitem__(self, rank: int) -> list[Instruction]:
        return [self.instruction(row) for row in self._rows_of_rank(rank)]

    def reordered(self, orders: Iterable[Ints]) -> "Program":
        """Return the same instructions in another order: for each rank the positions at which they are now.

        Raises:
            ScheduleError: the order takes a group of messages apart; `with_groups` of zeros before it dissolves groups.
        """
        # Before lowering is done, several columns are 0 everywhere: in any order they are the same.
        columns = {name: np.empty_like(column) for name in self.COLUMNS if (column := getattr(self, name)).any()}
        for (begin, end), order in zip(pairwise(self.offsets.tolist()), orders, strict=True):
            for name, column in columns.items():  # another mode than "raise" writes to `out` without a copy between
                getattr(self, name)[begin:end].take(order, out=column[begin:end], mode="clip")
        program = self._with(**columns)
        if self.has_groups:
            program._require_groups()
        return program

    def with_slots(self, slot: Ints) -> "Program":
        """Return the same instructions with other slots."""
        program = self._with(slot=slot)
        program._require_shapes()
        program._require_range("slot", None)
        return program

    def with_groups(self, group: Ints) -> "Program":
        """Return the same instructions with other groups of messages."""
        return replace(self, group=group)

    def inserted(self, new: "NewRows", **changes: Any) -> "Program":
        """Return the program with rows put in and other `changes`; among rows at one place, the order given counts."""
        in_order = np.argsort(new.key, kind="stable")
        # Keys 3r and 3r+2 mean before row r and before row r+1, the latter first.
        places = (new.key[in_order] + 2) // 3
        columns: dict[str, Any] = {}
        for name in self.COLUMNS:
            old = getattr(self, name)
            added = np.zeros(len(places)) if name in ("slot", "joined", "group") else getattr(new, name)[in_order]
            columns[name] = _interleaved(old, added.astype(old.dtype), places)
        counts = np.diff(self.offsets) + np.bincount(new.rank, minlength=self.num_ranks)
        return replace(self, **columns, offsets=np.concatenate([[0], np.cumsum(counts)]), **changes)

    def to_csv(self, *, torch_only: bool = False) -> str:
        """Return torch's CSV with communication; `torch_only` leaves out the instructions that torch does not know."""
        return table_to_csv(self.select(self.rows_of(IS_IN_TORCH)) if torch_only else self)

    @classmethod
    def from_csv(cls, text: str, *, file: str = "<text>", name: str = "from CSV") -> "Program":
        """Read torch's CSV with communication; the slots, which it does not hold, are 0 (see `lowering.assign_slots`).

        Raises:
            FormatError: with line and column of the first cell that is no instruction.
        """
        return cls(name=name, **program_from_csv(text, file))

    def to_json(self) -> str:
        """Return a text that reads back as the same program."""
        return program_to_json(self)

    @classmethod
    def from_json(cls, text: str, *, file: str = "<text>") -> "Program":
        """Read what `to_json` wrote.

        Raises:
            FormatError: with the place of what does not fit.
        """
        return cls(**program_from_json(text, file))

    @property
    def _metadata(self) -> tuple[Any, ...]:
        # Programs without units and groups have no such entries, so that their digests stay as they were.
        units = (self.units,) if self.units else ()
        groups = ("groups",) if self.has_groups else ()
        return *super()._metadata, self.tied_groups, self.omits_reductions, *units, *groups

    @property
    def _all_columns(self) -> tuple[str, ...]:
        columns = super()._all_columns
        return columns if self.has_groups else tuple(name for name in columns if name != "group")

    def _require_groups(self) -> None:
        """Make sure that the rows of a group are messages of one rank which follow each other.

        Raises:
            ScheduleError: with the first row that breaks its group.
        """
        self._require_range("group", None)
        if not self.has_groups:
            return
        rows = np.flatnonzero(self.group)
        others = rows[~IS_MESSAGE[self.op[rows]]]
        if len(others):
            raise self._wrong_number(int(others[0]), "group", "0, since only messages are launched in groups")
        keys = self.rank_of_row[rows].astype(np.int64) << 32 | self.group[rows]
        begins = np.flatnonzero((np.diff(keys, prepend=-1) != 0) | (np.diff(rows, prepend=-2) != 1))
        first_begins = begins[np.unique(keys[begins], return_index=True)[1]]
        again = begins[~np.isin(begins, first_begins)]
        if len(again):
            expected = "of a group whose rows follow each other on one rank, with nothing between them"
            raise self._wrong_number(int(rows[again[0]]), "group", expected)


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """Instructions to put into a program: columns as in `Program`, their rank, and a key that says where.

    `before(row)` and `after(row)` make keys from rows of the program that is changed.
    """

    key: Ints
    rank: Ints
    op: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints
    peer: Ints

    @staticmethod
    def before(row: Ints) -> Ints:
        return 3 * row

    @staticmethod
    def after(row: Ints) -> Ints:
        return 3 * row + 2


def _require_tied_group(group: tuple[int, ...], placement: Placement) -> None:
    if not all(0 <= stage < placement.num_stages for stage in group):
        raise ScheduleError(f"tied group {group}: the stages are 0..{placement.num_stages - 1}; name stages among them")
    first_of_rank: dict[int, int] = {}
    for stage in sorted(set(group)):
        rank = placement.rank_of_stage[stage]
        first = first_of_rank.setdefault(rank, stage)
        if first != stage:
            raise ScheduleError(
                f"tied group {group}: stages {first} and {stage} are on rank {rank}, where they share the parameter; "
                "name one stage of each rank"
            )


def _require_unit(unit: tuple[int, ...], placement: Placement) -> None:
    if not all(0 <= stage < placement.num_stages for stage in unit):
        problem = f"unit {unit}: the stages are 0..{placement.num_stages - 1}"
        raise ScheduleError(f"{problem}; name stages among them")
    ranks = sorted({placement.rank_of_stage[stage] for stage in unit})
    if len(ranks) > 1:
        problem = f"unit {unit}: its stages are on ranks {ranks}, so they hold copies of what they share"
        raise ScheduleError(f"{problem}; name stages of one rank, and tie stages of several ranks with tied_groups")


def _interleaved(old: Array, added: Array, places: Ints) -> Array:
    """Put each added value before the old one at its place; few values among many by whole pieces, which is faster."""
    if not old.any() and not added.any():
        return np.zeros(len(old) + len(added), old.dtype)
    if len(added) > _MANY:
        return np.insert(old, places, added)
    parts: list[Array] = [old[:0]] * (2 * len(added) + 1)
    parts[::2] = np.split(old, places)
    parts[1::2] = [added[index : index + 1] for index in range(len(added))]
    return np.concatenate(parts)
