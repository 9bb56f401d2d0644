"""`Schedule`: for every rank the order of its actions, as one immutable table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.formats.json_text import schedule_from_json, schedule_to_json
from penstock.ir.formats.torch_csv import schedule_from_csv, schedule_to_csv
from penstock.placement import Placement

Ints = NDArray[np.integer[Any]]

_INT16, _INT32 = np.iinfo(np.int16), np.iinfo(np.int32)
LIMITS = {
    "kind": (0, len(Kind) - 1),
    "stage": (_INT32.min, _INT32.max),
    "microbatch": (_INT32.min, _INT32.max),
    "slice": (_INT16.min, _INT16.max),
}
"""Per column the smallest and the largest number that it can hold."""


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """Columns of all ranks' actions, rank after rank; `offsets[rank]:offsets[rank + 1]` are the rows of one rank.

    `schedule[rank]` lists one rank's actions as values. Nothing here is proved: see `penstock.check`.
    """

    name: str
    placement: Placement
    num_microbatches: int
    num_slices: int
    route_of_microbatch: Ints
    """[num_microbatches] the route of the placement that each microbatch travels."""
    kind: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints
    joined: NDArray[np.bool_]
    """True in the first row of an overlapped pair; the second is the next row."""
    offsets: Ints

    def __post_init__(self) -> None:
        require_routes(self.name, self.placement, self.num_microbatches, self.route_of_microbatch)
        for column in self._columns:
            column.flags.writeable = False

    @classmethod
    def from_arrays(
        cls,
        name: str,
        placement: Placement,
        orders: Sequence[NDArray[Any]],
        *,
        num_microbatches: int,
        num_slices: int = 1,
        joined: NDArray[np.bool_] | None = None,
        route_of_microbatch: Ints | None = None,
    ) -> "Schedule":
        """Make a schedule from one array [num_actions, 3 or 4] per rank: kind, stage, microbatch (and slice).

        Raises:
            ScheduleError: for another number of arrays, a number that its column cannot hold, or wrong routes.
        """
        if len(orders) != placement.num_ranks:
            raise ScheduleError(
                f"{name}: {len(orders)} orders for {placement.num_ranks} ranks; give one order per rank"
            )
        offsets = np.zeros(len(orders) + 1, np.int64)
        np.cumsum([len(order) for order in orders], out=offsets[1:])
        num_rows = int(offsets[-1])
        kind: Ints = np.zeros(num_rows, np.int8)
        stage: Ints = np.zeros(num_rows, np.int32)
        microbatch: Ints = np.zeros(num_rows, np.int32)
        slices: Ints = np.zeros(num_rows, np.int16)
        columns = {"kind": kind, "stage": stage, "microbatch": microbatch, "slice": slices}
        for rank, (order, begin, end) in enumerate(zip(orders, offsets, offsets[1:], strict=False)):
            for what, numbers in zip(columns, order.T if len(order) else (), strict=False):
                _require_fits(f"{name}, rank {rank}: {what}", numbers, *LIMITS[what])
                columns[what][begin:end] = numbers
        # Copies, since the columns of a schedule are made read-only, and the caller's arrays are the caller's.
        no_routes: Ints = np.zeros(num_microbatches, np.int8)
        routes = no_routes if route_of_microbatch is None else np.array(route_of_microbatch)
        together = np.zeros(num_rows, np.bool_) if joined is None else np.array(joined)
        return cls(
            name, placement, num_microbatches, num_slices, routes, kind, stage, microbatch, slices, together, offsets
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
        """Make a schedule from the actions of each rank, in order."""
        arrays: list[NDArray[Any]] = []
        joined: list[bool] = []
        for order in orders:
            singles = [(action, first) for entry in order for action, first in _members(entry)]
            rows = [(action.kind, action.stage, action.microbatch, action.slice) for action, _ in singles]
            arrays.append(np.array(rows, np.int64).reshape(len(rows), 4))
            joined += [first for _, first in singles]
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
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        return len(self.kind)

    @property
    def is_forward_only(self) -> bool:
        return not bool(self.kind.any())

    def action(self, row: int) -> Action:
        """Return one row as a value."""
        return Action(Kind(int(self.kind[row])), int(self.stage[row]), int(self.microbatch[row]), int(self.slice[row]))

    def rank_of_row(self, row: int) -> int:
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def __getitem__(self, rank: int) -> list[Action | OverlappedPair]:
        if not -self.num_ranks <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of a schedule for {self.num_ranks} ranks")
        rank %= self.num_ranks
        return list(self._entries(int(self.offsets[rank]), int(self.offsets[rank + 1])))

    def _entries(self, row: int, end: int) -> Iterator[Action | OverlappedPair]:
        while row < end:
            if self.joined[row]:
                yield OverlappedPair(self.action(row), self.action(row + 1))
                row += 2
            else:
                yield self.action(row)
                row += 1

    def __len__(self) -> int:
        return self.num_ranks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.placement.rank_of_stage == other.placement.rank_of_stage
            and self.placement.routes == other.placement.routes
            and (self.num_microbatches, self.num_slices) == (other.num_microbatches, other.num_slices)
            and all(np.array_equal(mine, theirs) for mine, theirs in zip(self._columns, other._columns, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def _columns(self) -> tuple[NDArray[Any], ...]:
        return (
            self.offsets, self.kind, self.stage, self.microbatch, self.slice, self.joined, self.route_of_microbatch,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, ranks={self.num_ranks}, stages={self.num_stages}, "
            f"microbatches={self.num_microbatches}, actions={self.num_actions})"
        )

    def forward_only(self) -> "Schedule":
        """Return the forwards alone, in the same order, for evaluation."""
        keep = self.kind == Kind.FORWARD
        kept_before = np.concatenate([[0], np.cumsum(keep)])
        nothing_joined = np.zeros(int(keep.sum()), np.bool_)
        return Schedule(
            f"{self.name} (forward only)",
            self.placement,
            self.num_microbatches,
            self.num_slices,
            self.route_of_microbatch,
            self.kind[keep],
            self.stage[keep],
            self.microbatch[keep],
            self.slice[keep],
            nothing_joined,
            kept_before[self.offsets],
        )

    def to_csv(self) -> str:
        """Return torch's compute-only CSV, without idle slots."""
        return schedule_to_csv(self)

    @classmethod
    def from_csv(cls, text: str, *, file: str = "<text>", name: str = "from CSV") -> "Schedule":
        """Read torch's compute-only CSV; sizes and placement are inferred from it.

        Raises:
            FormatError: with line and column of the first cell that is no action.
        """
        return schedule_from_csv(text, cls, file=file, name=name)

    def to_json(self) -> str:
        """Return a text that reads back as the same schedule."""
        return schedule_to_json(self)

    @classmethod
    def from_json(cls, text: str, *, file: str = "<text>") -> "Schedule":
        """Read what `to_json` wrote.

        Raises:
            FormatError: with the place of what does not fit.
        """
        return schedule_from_json(text, cls, file=file)


def require_routes(name: str, placement: Placement, num_microbatches: int, route_of_microbatch: Ints) -> None:
    """Refuse a table whose microbatches do not each have a route of the placement: no stage would compute them.

    Raises:
        ScheduleError: with the first microbatch that has none.
    """
    routes, num_routes = route_of_microbatch, len(placement.routes)
    if routes.shape != (num_microbatches,) or routes.dtype.kind not in "iu":
        raise ScheduleError(
            f"{name}: expected {num_microbatches} whole numbers in route_of_microbatch, one per microbatch, got an "
            f"array of shape {routes.shape} and type {routes.dtype}"
        )
    wrong = np.flatnonzero((routes < 0) | (routes >= num_routes))
    if len(wrong):
        raise ScheduleError(
            f"{name}: microbatch {wrong[0]} travels route {routes[wrong[0]]}; expected a route of the placement, "
            f"from 0 and below {num_routes}"
        )


def _require_fits(where: str, numbers: Ints, smallest: int, largest: int) -> None:
    if smallest <= numbers.min() and numbers.max() <= largest:
        return
    outside = numbers[(numbers < smallest) | (numbers > largest)]
    raise ScheduleError(f"{where} {outside[0]} does not fit; expected a number from {smallest} to {largest}")


def _members(entry: Action | OverlappedPair) -> tuple[tuple[Action, bool], ...]:
    """The actions of an entry, each with whether it is the first of a pair."""
    if isinstance(entry, OverlappedPair):
        return ((entry.first, True), (entry.second, False))
    return ((entry, False),)
