"""The memory that a rank held during one training step, and the tables that show it for all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.ir.units import format_bytes
from penstock.tables import NO_SCREEN, Column, Screen, table_text


class Moment(StrEnum):
    """When a rank's memory is noted, in the order of a step."""

    BEGIN = "begin"
    """Before the first instruction."""
    AFTER_WARM_UP = "after warm-up"
    """Before the first backward."""
    PEAK = "peak"
    """When most is held."""
    END = "end"
    """After the last instruction."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The bytes of one stage, when its rank holds most."""

    stage: int
    parameter_bytes: int
    """Those of buffers too."""
    gradient_bytes: int
    num_activations: int
    """Microbatches (or slices) between their forward and the end of their backward."""
    activation_bytes: int
    """Kept of them by autograd, inputs of the stage included."""
    context_bytes: int
    """Of those whose backward has run its first part, what the weight gradients wait for."""

    @property
    def counted_bytes(self) -> int:
        """All of these bytes."""
        return self.parameter_bytes + self.gradient_bytes + self.activation_bytes + self.context_bytes


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """The bytes of a rank at one moment of a step."""

    name: Moment
    counted_bytes: int
    allocated_bytes: int | None
    """By torch's allocator for the accelerator; at the peak, the most since the beginning. None on a CPU."""
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that one rank held during a step."""

    rank: int = -1
    stages: tuple[StageMemory, ...] = ()
    received_bytes: int = 0
    """Buffers of receives, and what has arrived and is not used yet; at the peak."""
    unsent_bytes: int = 0
    """Made for another stage and not sent, or forwarded within the rank, at the peak. On an accelerator, also those
    that were sent and are not known to have left."""
    optimizer_bytes: int | None = None
    """Of its state on the device of the parameters; None where no optimizer was given."""
    peak_activations: int = 0
    """The most activations alive at once, which is what a check counts."""
    kept_bytes: int = 0
    """Of the buffers of receives: for gradients that replicas sum, kept from step to step."""
    points: tuple[MemoryPoint, ...] = ()

    @property
    def counted_bytes(self) -> int:
        """All bytes that were counted at the peak, the optimizer's state apart."""
        return sum(stage.counted_bytes for stage in self.stages) + self.received_bytes + self.unsent_bytes


# ---- tables

_STAGES = [
    Column("rank"),
    Column("stage"),
    Column("live", drop_order=3),
    Column("activations"),
    Column("contexts", drop_order=1),
    Column("parameters"),
    Column("gradients", drop_order=2),
    Column("received", drop_order=5),
    Column("unsent", drop_order=4),
]


def memory_text(ranks: Sequence[RankMemory], predicted_bytes: Sequence[int] = (), screen: Screen = NO_SCREEN) -> str:
    """Return both tables, one row per stage and one per rank.

    The second has the optimizer's state, which its points leave out, and the peak that was predicted, where known.
    """
    stages = [row for rank in ranks for row in _stage_rows(rank)]
    points = [[str(rank.rank), str(rank.peak_activations), *map(_point, rank.points)] for rank in ranks]
    names: list[str] = [point.name for point in ranks[0].points]
    if any(rank.optimizer_bytes is not None for rank in ranks):
        names.append("optimizer")
        sizes = [rank.optimizer_bytes for rank in ranks]
        texts = ["-" if size is None else format_bytes(size) for size in sizes]
        points = [[*row, text] for row, text in zip(points, texts, strict=True)]
    if predicted_bytes:
        names.append("predicted peak")
        points = [[*row, format_bytes(size)] for row, size in zip(points, predicted_bytes, strict=True)]
    # The first points of a step say least: they are left out first.
    late_first = [Column(name, drop_order=len(names) - index) for index, name in enumerate(names)]
    columns = [Column("rank"), Column("most live"), *late_first]
    title = "memory, when a rank holds most"
    tables = table_text(_STAGES, stages, screen), table_text(columns, points, screen)
    return f"{title}\n{tables[0]}\n\n{tables[1]}"


def _stage_rows(rank: RankMemory) -> list[list[str]]:
    rows = []
    messages = [format_bytes(rank.received_bytes), format_bytes(rank.unsent_bytes)]
    for stage in rank.stages:
        counts = (rank.rank, stage.stage, stage.num_activations)
        stage_bytes = (stage.activation_bytes, stage.context_bytes, stage.parameter_bytes, stage.gradient_bytes)
        rows.append([*map(str, counts), *map(format_bytes, stage_bytes), *messages])
        messages = ["", ""]  # they are the rank's, not a stage's
    return rows


def _point(point: MemoryPoint) -> str:
    counted = format_bytes(point.counted_bytes)
    if point.allocated_bytes is None or point.reserved_bytes is None:
        return counted
    allocated, reserved = format_bytes(point.allocated_bytes), format_bytes(point.reserved_bytes)
    return f"{counted} ({allocated} allocated, {reserved} reserved)"
