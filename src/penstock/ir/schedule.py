"""`Schedule`: for every rank the order of its actions, as one immutable table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError, described
from penstock.ir.action import Action, OverlappedPair
from penstock.ir.formats.json_text import schedule_from_json, schedule_to_json
from penstock.ir.formats.torch_csv import schedule_from_csv, table_to_csv
from penstock.ir.hot import Array, Bools
from penstock.ir.operations import IS_COMPUTE, KIND_LETTERS, Kind
from penstock.ir.table import Ints, Table, out_of_range, short_type
from penstock.placement import Placement


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(Table):
    """A table of actions: its operations are kinds of computation.

    `schedule[rank]` lists one rank's actions as values. Nothing here is proved: see `penstock.check`.
    """

    WHAT = "action"

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = np.flatnonzero(~IS_COMPUTE[self.op])
        if len(wrong):
            raise self._wrong_number(int(wrong[0]), "op", f"of a kind ({KIND_LETTERS})")

    @classmethod
    def from_arrays(
        cls,
        name: str,
        placement: Placement,
        orders: Sequence[Array],
        *,
        num_microbatches: int,
        num_slices: int = 1,
        joined: Bools | None = None,
        route_of_microbatch: Ints | None = None,
    ) -> "Schedule":
        """Make a schedule from one array [num_actions, 3 or 4] per rank: kind, stage, microbatch and, maybe, slice.

        `placement` says which rank holds which stage. `joined` [all actions, rank after rank] marks the first action of
        each overlapped pair, and `route_of_microbatch` says by which way through the stages each microbatch goes, 0 by
        default.

        Raises:
            ScheduleError: for arrays of another number or shape, a number that is out of range, or wrong routes.
        """
        if len(orders) != placement.num_ranks:
            raise ScheduleError(
                f"{name}: {len(orders)} orders for {placement.num_ranks} ranks; give one order per rank"
            )
        for rank, order in enumerate(orders):
            _require_rows(name, rank, order)
        # Put the arrays of all ranks one after another, in columns of the smallest integer type that fits.
        offsets = np.cumsum([0, *map(len, orders)])
        num_rows = int(offsets[-1])
        largest = (max(Kind), placement.num_stages - 1, num_microbatches - 1, num_slices - 1)
        kind: Ints = np.zeros(num_rows, np.int8)
        stage, microbatch, slices = (np.zeros(num_rows, short_type(limit)) for limit in largest[1:])
        columns = {"kind": kind, "stage": stage, "microbatch": microbatch, "slice": slices}
        for rank, (order, begin, end) in enumerate(zip(orders, offsets, offsets[1:], strict=False)):
            for column_name, numbers, limit in zip(columns, order.T if len(order) else (), largest, strict=False):
                _require_fits(name, rank, column_name, numbers, limit)
                columns[column_name][begin:end] = numbers
        # Copy the caller's arrays: a later change of theirs must not change the schedule.
        no_routes: Ints = np.zeros(num_microbatches, np.int8)
        routes = no_routes if route_of_microbatch is None else np.array(route_of_microbatch)
        is_joined = np.zeros(num_rows, np.bool_) if joined is None else np.array(joined)
        return cls(
            name, placement, num_microbatches, num_slices, routes, kind, stage, microbatch, slices, is_joined, offsets
        )

    @classmethod
    def from_actions(
        cls,
        name: str,
        placement: Placement,
        orders: Sequence[Sequence[Action | OverlappedPair]],
        *,
        num_microbatches: int,
        num_slices: int = 1,
        route_of_microbatch: Ints | None = None,
    ) -> "Schedule":
        """Make a schedule from the actions and overlapped pairs of each rank, in the order in which the rank runs them.

        `placement` says which rank holds which stage. `route_of_microbatch` says by which way through the stages each
        microbatch goes, 0 by default.

        Raises:
            ScheduleError: for anything but actions, and as `from_arrays`.
        """
        arrays: list[Array] = []
        joined: list[bool] = []
        for rank, order in enumerate(orders):
            actions_with_marks = [member for entry in order for member in _members(name, rank, entry)]
            rows = [(action.kind, action.stage, action.microbatch, action.slice) for action, _ in actions_with_marks]
            arrays.append(np.array(rows).reshape(len(rows), 4))
            joined += [is_first for _, is_first in actions_with_marks]
        return cls.from_arrays(
            name,
            placement,
            arrays,
            num_microbatches=num_microbatches,
            num_slices=num_slices,
            joined=np.array(joined, np.bool_),
            route_of_microbatch=route_of_microbatch,
        )

    @property
    def kind(self) -> Ints:
        """[num_actions] the kind of every action."""
        return self.op

    @property
    def num_actions(self) -> int:
        return self.num_rows

    def actions(self) -> "Schedule":
        """Return the schedule itself; of a program, the same call returns its computations."""
        return self

    def action(self, row: int) -> Action:
        """Return one row as a value."""
        return Action(Kind(int(self.kind[row])), int(self.stage[row]), int(self.microbatch[row]), int(self.slice[row]))

    row = action

    def __getitem__(self, rank: int) -> list[Action | OverlappedPair]:
        rows = self._rows_of_rank(rank)
        return list(self._entries(rows.start, rows.stop))

    def _entries(self, row: int, end: int) -> Iterator[Action | OverlappedPair]:
        while row < end:
            if self.joined[row]:
                yield OverlappedPair(self.action(row), self.action(row + 1))
                row += 2
            else:
                yield self.action(row)
                row += 1

    def forward_only(self) -> "Schedule":
        """Return the forwards alone, in the same order, for evaluation."""
        forwards = np.flatnonzero(self.kind == Kind.FORWARD)
        return self.select(forwards, name=f"{self.name} (forward only)")

    def with_inserted(self, kind: Kind, like: NDArray[np.intp], places: NDArray[np.intp], *, name: str) -> "Schedule":
        """Return the schedule with more actions: one for each row in `like`, of another kind, before its place."""
        added = {column_name: getattr(self, column_name)[like] for column_name in ("stage", "microbatch", "slice")}
        added |= {"op": np.full(len(like), kind), "joined": np.zeros(len(like), np.bool_)}
        columns: dict[str, Any] = {
            column_name: np.insert(getattr(self, column_name), places, new) for column_name, new in added.items()
        }
        more = np.bincount(self.rank_of_row[like], minlength=self.num_ranks)
        offsets = self.offsets + np.concatenate([[0], np.cumsum(more)])
        return replace(self, name=name, **columns, offsets=offsets)

    def to_csv(self) -> str:
        """Return torch's compute-only CSV, without idle slots."""
        return table_to_csv(self)

    @classmethod
    def from_csv(cls, text: str, *, file: str = "<text>", name: str = "from CSV") -> "Schedule":
        """Read torch's compute-only CSV; sizes and placement are inferred from it.

        Raises:
            FormatError: with line and column of the first cell that is no action.
        """
        return cls(name=name, **schedule_from_csv(text, file))

    def to_json(self) -> str:
        """Return a text that reads back as the same schedule."""
        return schedule_to_json(self)

    @classmethod
    def from_json(cls, text: str, *, file: str = "<text>") -> "Schedule":
        """Read what `to_json` wrote.

        Raises:
            FormatError: with the place of what does not fit.
        """
        return cls(**schedule_from_json(text, file))


def _require_rows(name: str, rank: int, order: object) -> None:
    shape = order.shape if isinstance(order, np.ndarray) else None
    if shape != (0,) and (shape is None or len(shape) != 2 or shape[1] not in (3, 4)):
        problem = described(order) if shape is None else f"an array of shape {shape}"
        raise ScheduleError(
            f"{name}, rank {rank}: {problem}; expected an array with one row per action: kind, stage, microbatch (and "
            "slice)"
        )


def _require_fits(name: str, rank: int, column_name: str, numbers: Ints, largest: int) -> None:
    """Refuse what is no number of a column before it is cut to the column's integers."""
    if numbers.dtype.kind not in "iu":
        raise ScheduleError(f"{name}, rank {rank}: {column_name} is of type {numbers.dtype}; expected whole numbers")
    wrong = np.flatnonzero((numbers < 0) | (numbers > largest))
    if len(wrong):
        raise out_of_range(name, rank, int(wrong[0]), f"{column_name} {numbers[wrong[0]]}", f"from 0 to {largest}")


def _members(name: str, rank: int, entry: object) -> Iterator[tuple[Action, bool]]:
    """The actions of an entry, each with whether it is the first of a pair."""
    members = (entry.first, entry.second) if isinstance(entry, OverlappedPair) else (entry,)
    for index, action in enumerate(members, start=1):
        if not isinstance(action, Action):
            raise ScheduleError(f"{name}, rank {rank}: {described(action)}; expected an Action or an OverlappedPair")
        yield action, index < len(members)
