"""`Program`: for every rank its instructions in order, as one immutable table; what is simulated and executed."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.formats.json_text import program_from_json, program_to_json
from penstock.ir.formats.torch_csv import program_from_csv, program_to_csv
from penstock.ir.instruction import Instruction, Op
from penstock.ir.schedule import Ints, Schedule, require_routes
from penstock.placement import Placement

COLUMNS = ("op", "stage", "microbatch", "slice", "peer", "slot", "joined")


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """Columns of all ranks' instructions, rank after rank; the columns mean what `Instruction` says."""

    name: str
    placement: Placement
    num_microbatches: int
    num_slices: int
    route_of_microbatch: Ints
    tied_groups: tuple[tuple[int, ...], ...]
    """Groups of stages that hold copies of one parameter and reduce its gradient together, at most one per rank."""
    op: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints
    peer: Ints
    slot: Ints
    joined: NDArray[np.bool_]
    offsets: Ints
    omits_reductions: bool = False
    """True for a training program that leaves all reductions to whoever runs it: so other systems write some of theirs,
    and so a program is before `lowering.add_reductions`. Of all others, `penstock.check` demands every reduction."""

    def __post_init__(self) -> None:
        require_routes(self.name, self.placement, self.num_microbatches, self.route_of_microbatch)
        for group in self.tied_groups:
            _require_tied_group(group, self.placement)
        for name in (*COLUMNS, "offsets", "route_of_microbatch"):
            getattr(self, name).flags.writeable = False

    @classmethod
    def from_schedule(cls, schedule: Schedule, *, tied_groups: tuple[tuple[int, ...], ...] = ()) -> "Program":
        """One compute instruction per action, nothing else."""
        return cls(
            schedule.name,
            schedule.placement,
            schedule.num_microbatches,
            schedule.num_slices,
            schedule.route_of_microbatch,
            tied_groups,
            op=schedule.kind,
            stage=schedule.stage,
            microbatch=schedule.microbatch,
            slice=schedule.slice,
            peer=schedule.stage,
            slot=np.zeros(schedule.num_actions, np.int32),
            joined=schedule.joined,
            offsets=schedule.offsets,
            omits_reductions=not schedule.is_forward_only,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_instructions(self) -> int:
        return len(self.op)

    @cached_property
    def is_compute(self) -> NDArray[np.bool_]:
        """[num_instructions] which rows compute."""
        return np.less_equal(self.op, Op.BACKWARD_WEIGHT)

    @property
    def is_backward(self) -> NDArray[np.bool_]:
        """[num_instructions] which rows are whole backwards or parts of one."""
        return np.greater(self.op, Op.FORWARD) & self.is_compute

    @property
    def is_forward_only(self) -> bool:
        return not bool(self.is_backward.any())

    @cached_property
    def rank_of_row(self) -> NDArray[np.int32]:
        """[num_instructions] the rank that runs each row."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    def instruction(self, row: int) -> Instruction:
        """Return one row as a value."""
        return Instruction(
            Op(int(self.op[row])),
            *(int(getattr(self, name)[row]) for name in ("stage", "microbatch", "slice", "peer", "slot")),
        )

    def __getitem__(self, rank: int) -> list[Instruction]:
        if not -self.num_ranks <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of a program for {self.num_ranks} ranks")
        rank %= self.num_ranks
        return [self.instruction(row) for row in range(int(self.offsets[rank]), int(self.offsets[rank + 1]))]

    def __len__(self) -> int:
        return self.num_ranks

    def __repr__(self) -> str:
        return (
            f"Program({self.name!r}, ranks={self.num_ranks}, stages={self.num_stages}, "
            f"microbatches={self.num_microbatches}, instructions={self.num_instructions})"
        )

    def reordered(self, order: Ints) -> "Program":
        """Return the same instructions in another order; rows stay on their rank."""
        columns = {name: np.empty_like(getattr(self, name)) for name in COLUMNS}
        for begin, end in pairwise(self.offsets.tolist()):  # a rank's rows stay in cache while they change places
            within = order[begin:end].astype(np.intp) - begin
            for name, column in columns.items():
                getattr(self, name)[begin:end].take(within, out=column[begin:end])
        return replace(self, **columns)

    def with_slots(self, slot: Ints) -> "Program":
        """Return the same instructions with other slots."""
        return replace(self, slot=slot)

    def inserted(self, new: "NewRows") -> "Program":
        """Return the program with rows put in; among rows at one place, the order given counts."""
        in_order = np.argsort(new.key, kind="stable")
        # Keys 3r and 3r+2 mean in front of row r and in front of row r+1, the latter first.
        places = (new.key[in_order] + 2) // 3
        columns: dict[str, Any] = {}
        for name in COLUMNS:
            old = getattr(self, name)
            added = np.zeros(len(places)) if name in ("slot", "joined") else getattr(new, name)[in_order]
            columns[name] = _interleaved(old, added.astype(old.dtype), places)
        counts = np.diff(self.offsets) + np.bincount(new.rank, minlength=self.num_ranks)
        return replace(self, **columns, offsets=np.concatenate([[0], np.cumsum(counts)]))

    def to_csv(self, *, torch_only: bool = False) -> str:
        """Return torch's CSV with communication; `torch_only` leaves out the instructions that torch does not know."""
        return program_to_csv(self, torch_only=torch_only)

    @classmethod
    def from_csv(cls, text: str, *, file: str = "<text>", name: str = "from CSV") -> "Program":
        """Read torch's CSV with communication; the slots, which it does not hold, are 0 (see `lowering.assign_slots`).

        Raises:
            FormatError: with line and column of the first cell that is no instruction.
        """
        return program_from_csv(text, cls, file=file, name=name)

    def to_json(self) -> str:
        """Return a text that reads back as the same program."""
        return program_to_json(self)

    @classmethod
    def from_json(cls, text: str, *, file: str = "<text>") -> "Program":
        """Read what `to_json` wrote.

        Raises:
            FormatError: with the place of what does not fit.
        """
        return program_from_json(text, cls, file=file)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        same_sizes = (self.num_microbatches, self.num_slices, self.tied_groups, self.omits_reductions) == (
            other.num_microbatches, other.num_slices, other.tied_groups, other.omits_reductions,
        )  # fmt: skip
        same_placement = (self.placement.rank_of_stage, self.placement.routes) == (
            other.placement.rank_of_stage, other.placement.routes,
        )  # fmt: skip
        columns = (*COLUMNS, "offsets", "route_of_microbatch")
        return (
            same_sizes
            and same_placement
            and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)
        )

    __hash__ = None  # type: ignore[assignment]


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


def _interleaved(old: NDArray[Any], added: NDArray[Any], places: Ints) -> NDArray[Any]:
    """Put each added value in front of the old one at its place; few values among many, so by whole pieces."""
    parts: list[NDArray[Any]] = [old[:0]] * (2 * len(added) + 1)
    parts[::2] = np.split(old, places)
    parts[1::2] = [added[index : index + 1] for index in range(len(added))]
    return np.concatenate(parts)
