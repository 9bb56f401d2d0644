"""`Timeline`: what ran when, on which rank; predicted, measured, or by an untimed walk, always this one type."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, FormatError, described
from penstock.files import atomic_file
from penstock.ir.formats.timeline_json import timeline_from_json, timeline_to_json
from penstock.ir.hot import Int64s, frozen
from penstock.ir.live import StageBytes, peak_activations, peak_bytes, peak_host_bytes
from penstock.ir.measured import HostTimes, ImmediateWeights, Prologue
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
    step: int = 0
    """Number of the measured training step, counted from 1; 0 where there is none."""
    message_bytes: tuple[int, ...] = ()
    """[num_stages] measured bytes of each stage's output, 0 for a last stage; empty where they are not known."""
    layers_of_stage: tuple[range, ...] = ()
    """[num_stages] layers of the model that was measured; empty where they are not known."""
    layer_weights: tuple[float, ...] = ()
    """[num_layers] relative cost of each layer, as the split assumed."""
    prologues: tuple[Prologue, ...] = ()
    """[num_ranks] moments of each rank before the step; empty where they are not known."""
    early_weights: Mapping[int, ImmediateWeights] = field(default_factory=dict)
    """Weight gradients that were computed in I, by stage whose backwards are split."""
    num_replicas: int = 1
    """Number of replicas that ran the step together, of which this is the timeline of one."""
    host: HostTimes | None = None
    """When hosts called the rows, of which `start_s` and `end_s` say when devices ran them; None: unknown."""

    def __post_init__(self) -> None:
        num_rows = self.program.num_rows
        columns = {name: getattr(self, name) for name in ("start_s", "end_s")}
        if self.host is not None:
            columns |= {f"host.{name}": column for name, column in self.host._asdict().items()}
        for name, column in columns.items():
            if getattr(column, "shape", None) != (num_rows,):
                problem = f"an array of shape {column.shape}" if isinstance(column, np.ndarray) else described(column)
                expected = f"a numpy array of {num_rows} seconds, one for each instruction of {self.program.name!r}"
                raise ConfigError(f"{problem}; expected {expected}", key=name)
        object.__setattr__(self, "start_s", frozen(self.start_s))
        object.__setattr__(self, "end_s", frozen(self.end_s))
        if self.host is not None:
            object.__setattr__(self, "host", HostTimes(*map(frozen, self.host)))

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
        seconds_of_ranks = []
        for rows in self.program.ranks:
            op, duration_s = self.program.op[rows], self.end_s[rows] - self.start_s[rows]
            total_s = np.bincount(op, weights=duration_s, minlength=len(Op)).tolist()
            seconds_of_ranks.append({kind: total_s[kind] for kind in Op if (op == kind).any()})
        return seconds_of_ranks

    def to_json(self) -> str:
        """Return everything that the timeline holds as a text, which `from_json` reads back to the last bit."""
        return timeline_to_json(self)

    @classmethod
    def from_json(cls, text: str, *, file: str = "<text>") -> Self:
        """Read what `to_json` wrote; `file` is what errors name.

        Raises:
            FormatError: the text is no timeline, or of a newer Penstock, or a part of it is missing or wrong.
        """
        columns = timeline_from_json(text, file)
        return cls(**columns | {"data_waits": tuple(DataWait(**wait) for wait in columns["data_waits"])})

    def save(self, path: str | Path) -> None:
        """Write the timeline to a `.json` file, which `load` and `penstock show`, `compare` and `doctor` read.

        A file of this name is replaced, by a whole one. A pipeline's timeline is the same on all of its ranks, so one
        of them may save it, or all of them under one name. Each replica measures a timeline of its own.

        Raises:
            ConfigError: the name does not end in `.json`.
            PenstockError: the file cannot be written.
        """
        target = Path(path)
        if target.suffix.lower() != ".json":
            raise ConfigError(
                f"{target} does not end in .json; end it so, or draw a picture with penstock.draw", key="path"
            )
        with atomic_file(target) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote, or the `timeline.json` of a run folder.

        Raises:
            ConfigError: the file cannot be read.
            FormatError: as `from_json`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a file that `save` wrote") from error
        except UnicodeDecodeError as error:
            raise FormatError(
                f"byte {error.start} is not UTF-8 text; save the timeline again", file=str(path)
            ) from error
        return cls.from_json(text, file=str(path))

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
