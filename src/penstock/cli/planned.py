"""A plan of a run as text for people: one fact a line."""

from collections.abc import Iterator

from penstock.errors import count_of
from penstock.ir.units import byte_unit, format_bytes, three_digits
from penstock.run_planning.run_plan import RunLayout, RunPlan
from penstock.show.text import format_share, time_unit
from penstock.tables import NO_SCREEN, Column, Screen, table_text


def to_table(plan: RunPlan, screen: Screen = NO_SCREEN) -> str:
    """Return a plan as lines: whether it fits, the best layouts, the bound, and how far to trust it."""
    chosen = plan.chosen
    first = (
        f"fits: yes; {chosen.num_layouts} layouts, {chosen.num_may_fit} may fit, {chosen.num_evaluated} evaluated, "
        f"{chosen.num_cut_off} cut off by their bounds"
    )
    unit_s, unit = time_unit(plan.best.step_s)
    bound_text = three_digits(plan.bound.seconds / unit_s)
    bound = f"bound  {bound_text} {unit}: {plan.bound.name}, any layout that may fit; gap {format_share(plan.gap)}"
    lines = [first, table_text(_columns(plan), list(_rows(plan)), screen), bound, *plan.notes]
    return "\n".join([screen.wrapped(lines[0]), lines[1], *map(screen.wrapped, lines[2:])])


def _columns(plan: RunPlan) -> list[Column]:
    unit_bytes, unit = byte_unit(plan.best.peak_bytes)
    memory_bytes = plan.question.cluster.memory_bytes
    is_alike = byte_unit(memory_bytes) == (unit_bytes, unit)
    memory = three_digits(memory_bytes / unit_bytes) if is_alike else format_bytes(memory_bytes)
    utilization = [Column("MFU", drop_order=3)] if plan.best.flops_utilization is not None else []
    return [
        Column(""),
        Column("pipeline x data", is_text=True),
        Column("shard", is_text=True),
        Column("schedule", is_text=True),
        Column("micro"),
        Column("recompute", is_text=True, drop_order=2),
        Column(f"step {time_unit(plan.best.step_s)[1]} (range)", is_text=True),
        Column("tok/s", drop_order=1),
        *utilization,
        Column(f"peak {unit} of {memory}", is_text=True),
    ]


def _rows(plan: RunPlan) -> Iterator[list[str]]:
    unit_s, unit_bytes = time_unit(plan.best.step_s)[0], byte_unit(plan.best.peak_bytes)[0]
    for place, layout in enumerate(plan.layouts, start=1):
        utilization = layout.flops_utilization
        yield [
            str(place),
            f"{layout.pipeline} x {layout.data}",
            layout.shard,
            layout.schedule,
            f"{layout.planned.layout.microbatch_size}x{layout.planned.layout.microbatches}",
            _recompute(layout),
            _step(layout, unit_s),
            f"{layout.tokens_per_s:,.0f}",
            *([] if utilization is None else [f"{100 * utilization:.0f} %"]),
            f"{three_digits(layout.peak_bytes / unit_bytes)}  rank {layout.planned.fullest_rank}",
        ]


def _recompute(layout: RunLayout) -> str:
    """Say what runs again: blocks, by their checkpointing, and whole stages."""
    kind, stages = layout.planned.layout.checkpointing, layout.planned.num_recomputed
    return f"{kind}, {count_of(stages, 'stage')}" if stages else kind


def _step(layout: RunLayout, unit_s: float) -> str:
    step, low, high = (three_digits(seconds / unit_s) for seconds in (layout.step_s, *layout.step_range_s))
    return f"{step} ({low} to {high})"
