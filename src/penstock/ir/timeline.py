"""`Timeline`: what ran when, on which rank; predicted, measured, or by an untimed walk, always this one type."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described
from penstock.ir.hot import Int64s, frozen
from penstock.ir.live import StageBytes, peak_activations, peak_bytes, peak_host_bytes
from penstock.ir.operations import Op
from penstock.ir.program import Program

Floats = NDArray[np.float64]
Source = Literal["untimed", "predicted", "measured"]


@dataclass(frozen=True, slots=True)
class DataWait:
    """A rank had to wait until it had the data of a microbatch that a stream brings inside a step."""

    rank: int
    microbatch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Start and end of every instruction of a program, in seconds from the first start.

    A computation starts when its inputs are there and the host has launched it, so launches are idle time. A receive
    ends when its message has arrived, a send when it has left.

    Raises:
        ConfigError: the times are not one for each instruction of the program.
    """

    program: Program
    source: Source
    start_s: Floats
    end_s: Floats
    sizes: StageBytes | None = None
    """Bytes of what stages make and keep; None where unknown, which counts as 0."""
    clock_uncertainty_s: float = 0.0
    """The most by which times of different ranks may be off against each other; 0 where they have one clock."""
    data_waits: tuple[DataWait, ...] = ()
    """Each rank's in their order. The first microbatch is waited for before the step's instructions, so below 0."""

    def __post_init__(self) -> None:
        num_rows = self.program.num_rows
        for name in ("start_s", "end_s"):
            column = getattr(self, name)
            if getattr(column, "shape", None) != (num_rows,):
                found = f"an array of shape {column.shape}" if isinstance(column, np.ndarray) else described(column)
                expected = f"a numpy array of {num_rows} seconds, one for each instruction of {self.program.name!r}"
                raise ConfigError(f"{found}; expected {expected}", key=name)
            object.__setattr__(self, name, frozen(column))

    @cached_property
    def _bounds_s(self) -> tuple[Floats, Floats]:
        """Per rank: first start and last end of its computations; where it has none, the first start of all."""
        first = np.full(self.num_ranks, self.start_s[self.program.is_compute].min(initial=np.inf))
        last = first.copy()
        for rank in range(self.num_ranks):
            rows = self.compute_rows(rank)
            if len(rows):
                first[rank], last[rank] = self.start_s[rows].min(), self.end_s[rows].max()
        return first, last

    def compute_rows(self, rank: int) -> Int64s:
        """Return the rows of one rank's computations, in order."""
        return self.program.compute_rows(rank)

    @property
    def num_ranks(self) -> int:
        return self.program.num_ranks

    @cached_property
    def work_s(self) -> Floats:
        """[num_ranks] seconds in which each rank computes."""
        rows = [self.compute_rows(rank) for rank in range(self.num_ranks)]
        return np.array([float(_covered_s(self.start_s[row], self.end_s[row])) for row in rows])

    @property
    def makespan_s(self) -> float:
        """First start to last end over all ranks."""
        first, last = self._bounds_s
        return float(last.max() - first.min())

    @property
    def span_s(self) -> float:
        """The largest first-start-to-last-end of any one rank."""
        first, last = self._bounds_s
        return float((last - first).max())

    @property
    def step_s(self) -> float:
        """First start to last end of all instructions: the makespan, with collectives and optimizer steps around it."""
        return float(self.end_s.max() - self.start_s.min()) if len(self.end_s) else 0.0

    @property
    def bubble_fraction(self) -> float:
        """1 - work / (ranks x makespan)."""
        makespan = self.makespan_s
        return 1.0 - float(self.work_s.sum()) / (self.num_ranks * makespan) if makespan else 0.0

    @property
    def bubble_rate(self) -> float:
        """1 - work of a rank / span, the convention of the zero-bubble papers; the mean rank where they differ."""
        span = self.span_s
        return 1.0 - float(self.work_s.mean()) / span if span else 0.0

    @cached_property
    def peak_activations(self) -> list[int]:
        """Per rank, the most activations alive at once."""
        return peak_activations(self.program)

    @cached_property
    def peak_bytes(self) -> list[int]:
        """Per rank, the most bytes alive at once of activations, tensors saved for wgrad, messages, and whole weights
        and gradients of stages that are gathered; 0: unknown."""
        return [0] * self.num_ranks if self.sizes is None else peak_bytes(self.program, self.sizes)

    @cached_property
    def peak_host_bytes(self) -> list[int]:
        """Per rank, the most bytes offloaded to its host at once; 0: none, or unknown."""
        return [0] * self.num_ranks if self.sizes is None else peak_host_bytes(self.program, self.sizes)

    @property
    def static_bytes(self) -> tuple[int, ...]:
        """Per rank, bytes of parameters, gradients and optimizer state, or of its shards of them; empty where unknown.

        They are not in `peak_bytes`.
        """
        return () if self.sizes is None else tuple(self.sizes.static_of_ranks(self.program.placement).tolist())

    def seconds_by_op(self) -> list[dict[Op, float]]:
        """Per rank, the seconds of all its instructions of each operation that it ran, in the order of operations.

        A receive takes from when it is posted until its message has arrived, so other instructions run meanwhile.
        """
        found = []
        for rows in self.program.ranks:
            op, duration_s = self.program.op[rows], self.end_s[rows] - self.start_s[rows]
            total_s = np.bincount(op, weights=duration_s, minlength=len(Op)).tolist()
            found.append({each: total_s[each] for each in Op if (op == each).any()})
        return found

    def __repr__(self) -> str:
        return (
            f"Timeline({self.source} {self.program.name!r}, makespan_s={self.makespan_s:.6g}, "
            f"bubble_fraction={self.bubble_fraction:.4f})"
        )


def _covered_s(start: Floats, end: Floats) -> float:
    """Length of the union of intervals given in order of their start; overlapped pairs count once."""
    if not len(start):
        return 0.0
    reach = np.maximum.accumulate(end)
    begins = np.maximum(start[1:], reach[:-1])
    return float(end[0] - start[0] + np.maximum(end[1:] - begins, 0.0).sum())
