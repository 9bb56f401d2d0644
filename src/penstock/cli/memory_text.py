"""What the ranks held in memory, as tables: when most was held, stage by stage, and at fixed points of the step."""

from collections.abc import Sequence

from penstock.execute.observing.memory_report import MemoryPoint, RankMemory
from penstock.show.text import format_bytes
from penstock.tables import NO_SCREEN, Column, Screen, table_text

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
    """Return both tables, one row per stage and one per rank, with the peak that was predicted of it if known."""
    stages = [row for rank in ranks for row in _stage_rows(rank)]
    points = [[str(rank.rank), str(rank.peak_activations), *map(_point, rank.points)] for rank in ranks]
    names: list[str] = [point.name for point in ranks[0].points]
    if predicted_bytes:
        names.append("predicted peak")
        points = [[*row, format_bytes(size)] for row, size in zip(points, predicted_bytes, strict=True)]
    # The first points of a step say least: they are left out first.
    late_first = [Column(name, drop_order=len(names) - index) for index, name in enumerate(names)]
    columns = [Column("rank"), Column("most live"), *late_first]
    title = "memory, when a rank holds most"
    return f"{title}\n{table_text(_STAGES, stages, screen)}\n\n{table_text(columns, points, screen)}"


def _stage_rows(rank: RankMemory) -> list[list[str]]:
    rows = []
    messages = [format_bytes(rank.received_bytes), format_bytes(rank.unsent_bytes)]
    for stage in rank.stages:
        held = (stage.activation_bytes, stage.context_bytes, stage.parameter_bytes, stage.gradient_bytes)
        own = [str(rank.rank), str(stage.stage), str(stage.num_activations), *map(format_bytes, held)]
        rows.append([*own, *messages])
        messages = ["", ""]  # they are the rank's, not a stage's
    return rows


def _point(point: MemoryPoint) -> str:
    counted = format_bytes(point.counted_bytes)
    if point.allocated_bytes is None or point.reserved_bytes is None:
        return counted
    return f"{counted} ({format_bytes(point.allocated_bytes)} allocated, {format_bytes(point.reserved_bytes)} reserved)"
