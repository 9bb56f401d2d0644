"""`Table`: what a schedule and a program share, columns of all ranks' rows that cannot be changed.

    offsets  0           3           6        rank 0 has the rows 0, 1, 2, rank 1 the rows 3, 4, 5
    op       F   F   B   F   B   F
    stage    0   0   0   1   1   1

Numbers that no table can hold are refused here, so all other code may use columns as indices. Whether the rows make
sense is for `penstock.check` to prove.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError, cut, described, shortened
from penstock.ir.hot import Array, Bools, Int32s, Int64s, blocks, frozen
from penstock.ir.operations import (
    ENDS_KEEPING,
    IS_BACKWARD,
    IS_COMPUTE,
    NAMES_MICROBATCH,
    NUM_OPS,
    RUNS_AUTOGRAD,
    Flags,
    Op,
)
from penstock.placement import Placement

Ints = NDArray[np.integer[Any]]
IS_PART = IS_BACKWARD & ~(RUNS_AUTOGRAD & ENDS_KEEPING)
"""[NUM_OPS] parts of split backwards: a whole one computes all gradients and frees what it needs."""
MAX_NAME_CHARACTERS = 200
RowRange = slice
"""Rows that follow one another; a table has a column of the name."""


@dataclass(frozen=True, eq=False, repr=False)
class Table(ABC):
    """Columns with one entry per row, rank after rank; `offsets[rank]:offsets[rank + 1]` are the rows of one rank."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("op", "stage", "microbatch", "slice", "joined")
    WHAT: ClassVar[str] = "table"

    name: str
    """A label; messages and pictures have all of it, so it is cut to `MAX_NAME_CHARACTERS`."""
    placement: Placement
    num_microbatches: int
    num_slices: int
    route_of_microbatch: Ints
    """[num_microbatches] the route of the placement that each microbatch travels."""
    op: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints
    joined: Bools
    """True in the first row of an overlapped pair; the second is the next row."""
    offsets: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", cut(str(self.name), MAX_NAME_CHARACTERS))
        # Views, since a column that is locked would lock the array of whoever made the table.
        for name in (*self.COLUMNS, "offsets", "route_of_microbatch"):
            column = getattr(self, name)
            if not isinstance(column, np.ndarray):
                raise ScheduleError(f"{self.name}: {name} is {described(column)}; expected a numpy array")
            object.__setattr__(self, name, frozen(column))
        self._require_shapes()
        self._require_range("op", NUM_OPS - 1)
        self._require_range("stage", self.num_stages - 1)
        self._require_range("microbatch", self.num_microbatches - 1)
        self._require_range("slice", self.num_slices - 1)

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def ranks(self) -> list[RowRange]:
        """The rows of each rank."""
        return [RowRange(*bounds) for bounds in pairwise(self.offsets.tolist())]

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def parts_per_rank(self) -> Fraction:
        """Stages and slices that a rank runs for one microbatch, in the mean; each makes an activation."""
        return self.placement.stages_per_rank * self.num_slices

    @property
    def num_rows(self) -> int:
        return len(self.op)

    @property
    def number(self) -> Ints:
        """[num_rows] what a row's text names after its operation: the microbatch, or a tied group."""
        return self.microbatch

    @cached_property
    def is_compute(self) -> Bools:
        """[num_rows] which rows compute."""
        return self._flagged(IS_COMPUTE)

    @property
    def is_backward(self) -> Bools:
        """[num_rows] which rows are whole backwards or parts of one."""
        return self._flagged(IS_BACKWARD)

    @cached_property
    def is_forward_only(self) -> bool:
        return not any(IS_BACKWARD[op] for op in self.ops)

    @property
    def split_stages(self) -> frozenset[int]:
        """The stages whose backwards run in parts."""
        return frozenset(self.stage[self.rows_of(IS_PART)].tolist())

    @cached_property
    def rank_of_row(self) -> Int32s:
        """[num_rows] the rank that runs each row."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def ops(self) -> list[Op]:
        """The operations that occur, by ascending number."""
        counts = np.zeros(NUM_OPS, np.int64)
        for part in blocks(self.num_rows):
            counts += np.bincount(self.op[part], minlength=NUM_OPS)
        return [op for op in Op if counts[op]]

    def last_backwards(self) -> Int64s:
        """[num_stages] the last row of each stage that is a backward or a part of one, -1 without any."""
        last = np.full(self.num_stages, -1, np.int64)
        for part in blocks(self.num_rows):
            rows = part.start + np.flatnonzero(IS_BACKWARD.take(self.op[part]))
            last[self.stage[rows]] = rows  # rows ascend, and the last assignment stays
        return last

    def rows_of(self, flags: Flags) -> NDArray[np.intp]:
        """Return the rows whose operations have a flag, such as `operations.IS_SEND`, in order."""
        is_there = any(flags[op] for op in self.ops)
        return np.flatnonzero(self._flagged(flags)) if is_there else np.empty(0, np.intp)

    def compute_rows(self, rank: int | None = None) -> NDArray[np.intp]:
        """Return the rows that compute, of one rank or of all, in order."""
        if rank is None:
            return np.flatnonzero(self.is_compute)
        begin, end = int(self.offsets[rank]), int(self.offsets[rank + 1])
        return begin + np.flatnonzero(self.is_compute[begin:end])

    def select(self, rows: NDArray[np.intp], *, name: str | None = None) -> Self:
        """Return the table with only these rows, which ascend; a pair that loses a row is no pair any more."""
        return replace(self, name=name or self.name, **self.selected(rows, self.COLUMNS))

    def first_microbatches(self, number: int) -> Self:
        """Return the rows of so many microbatches and all that name none, in the same order.

        So a replica with fewer rows of a batch than another one gathers and drops what that one does.
        """
        selection = self.select(np.flatnonzero((self.microbatch < number) | ~NAMES_MICROBATCH[self.op]))
        return replace(selection, num_microbatches=number, route_of_microbatch=self.route_of_microbatch[:number])

    def selected(self, rows: NDArray[np.intp], names: Sequence[str]) -> dict[str, Any]:
        """Return these columns of these rows, which ascend, and their offsets."""
        columns = {name: getattr(self, name)[rows] for name in names}
        if columns["joined"].any():
            columns["joined"] &= np.append(rows[1:] == rows[:-1] + 1, False)[: len(rows)]
        return {**columns, "offsets": np.searchsorted(rows, self.offsets)}

    def _with(self, **columns: Array) -> Self:
        """Return the table with other columns that are as valid as its own, which it does not look at again."""
        table = copy(self)
        for name, column in columns.items():
            object.__setattr__(table, name, frozen(column))
        if "op" in columns:
            table.__dict__.pop("is_compute", None)
        return table

    @abstractmethod
    def actions(self) -> Any:
        """Return the computations alone, as a `Schedule`."""

    @abstractmethod
    def row(self, row: int) -> object:
        """Return one row as a value, whose text is that of the formats."""

    def digest(self) -> str:
        """Return 64 hexadecimal digits that are equal for equal tables, whatever their names and integer types."""
        digest = hashlib.sha256(repr(self._metadata).encode())
        for name in self._all_columns:
            digest.update(np.ascontiguousarray(getattr(self, name), np.int64).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.num_ranks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table) or type(other) is not type(self):
            return NotImplemented
        return self._metadata == other._metadata and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self._all_columns
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, ranks={self.num_ranks}, stages={self.num_stages}, "
            f"microbatches={self.num_microbatches}, {self.WHAT}s={self.num_rows})"
        )

    @property
    def _all_columns(self) -> tuple[str, ...]:
        return *self.COLUMNS, "offsets", "route_of_microbatch"

    @property
    def _metadata(self) -> tuple[Any, ...]:
        """All that makes tables with the same columns different, apart from their names."""
        return self.placement.rank_of_stage, self.placement.routes, self.num_microbatches, self.num_slices

    def _flagged(self, flags: Flags) -> Bools:
        is_flagged = np.empty(self.num_rows, np.bool_)
        for part in blocks(self.num_rows):
            flags.take(self.op[part], out=is_flagged[part], mode="clip")
        return is_flagged

    def _rows_of_rank(self, rank: int) -> range:
        """The rows of a rank, which may be counted from the end. Raises: IndexError, if there is no such rank."""
        if not -self.num_ranks <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of a {type(self).__name__.lower()} for {self.num_ranks} ranks")
        return range(*self.offsets[rank % self.num_ranks :][:2].tolist())

    def _require_shapes(self) -> None:
        """Check that counts, columns and routes have the shapes and types that fit each other.

        `offsets` [num_ranks + 1] says where the rows of each rank begin and end in every column. A route is a way of
        microbatches through the stages; `route_of_microbatch` has its number for each microbatch.

        Raises:
            ScheduleError: with the first shape, type or number that does not fit.
        """
        counts = {"microbatches": self.num_microbatches, "slices": self.num_slices}
        for counted, count in counts.items():
            if count < 1:
                raise ScheduleError(f"{self.name}: {count} {counted}; expected 1 or more")
        lengths = np.diff(self.offsets)
        if len(lengths) != self.placement.num_ranks or (lengths < 0).any() or self.offsets[0] != 0:
            raise ScheduleError(
                f"{self.name}: the offsets {shortened(self.offsets.tolist())} are not those of "
                f"{self.placement.num_ranks} ranks; expected 0 and, for each rank, the end of its rows"
            )
        for name in self.COLUMNS:
            column = getattr(self, name)
            dtype_kinds = "b" if name == "joined" else "iu"
            if column.shape != (self.offsets[-1],) or column.dtype.kind not in dtype_kinds:
                raise ScheduleError(
                    f"{self.name}: the column {name} has shape {column.shape} and type {column.dtype}; expected "
                    f"{self.offsets[-1]} {'booleans' if name == 'joined' else 'whole numbers'}"
                )
        routes, num_routes = self.route_of_microbatch, len(self.placement.routes)
        if routes.shape != (self.num_microbatches,) or routes.dtype.kind not in "iu":
            raise ScheduleError(
                f"{self.name}: expected {self.num_microbatches} whole numbers in route_of_microbatch, one per "
                f"microbatch, got an array of shape {routes.shape} and type {routes.dtype}"
            )
        stray = np.flatnonzero((routes < 0) | (routes >= num_routes))
        if len(stray):
            raise ScheduleError(
                f"{self.name}: microbatch {stray[0]} travels route {routes[stray[0]]}; expected a route of the "
                f"placement, from 0 and below {num_routes}"
            )

    def _require_range(self, column_name: str, largest: int | None) -> None:
        """Refuse a column with a number below 0 or above `largest`; None where there is no largest."""
        column = getattr(self, column_name)
        if column.min(initial=0) < 0 or (largest is not None and column.max(initial=0) > max(largest, 0)):
            wrong = np.flatnonzero((column < 0) | (column > (column if largest is None else largest)))
            raise self._wrong_number(
                int(wrong[0]), column_name, "0 or more" if largest is None else f"from 0 to {largest}"
            )

    def _wrong_number(self, row: int, column_name: str, expected: str) -> ScheduleError:
        rank = int(np.searchsorted(self.offsets, row, side="right")) - 1
        position = row - int(self.offsets[rank])
        return out_of_range(self.name, rank, position, f"{column_name} {getattr(self, column_name)[row]}", expected)


def short_type(largest: int) -> type[np.signedinteger[Any]]:
    """Return the type of a column of numbers from 0 to `largest`; the smaller a table, the faster it is to go through.

    A product with a Python number would be as short and could overflow: make it with `np.int32` or `np.int64`.
    """
    return np.int16 if largest <= np.iinfo(np.int16).max else np.int32


def out_of_range(name: str, rank: int, position: int, value: str, expected: str) -> ScheduleError:
    """Return the error for a number that no such table can hold."""
    return ScheduleError(
        f"{name}, rank {rank}, position {position}: {value} is out of range; expected a number {expected}"
    )
