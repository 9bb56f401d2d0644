"""What a rank keeps in memory over time, as the steps of a curve; charts and traces draw the same one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.instruction import Op
from penstock.ir.live import live_activations, live_bytes
from penstock.ir.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """Steps: from `time_s[n]` on, `alive[n]` activations (or bytes, where `is_bytes`) are kept."""

    time_s: NDArray[np.float64]
    alive: NDArray[np.int64]
    is_bytes: bool


def memory_curves(timeline: Timeline, *, in_bytes: bool | None = None) -> list[MemoryCurve]:
    """Return one curve per rank; in bytes if these are known, unless told otherwise."""
    program = timeline.program
    known = bool(timeline.activation_bytes.any())
    counts_bytes = known if in_bytes is None else in_bytes
    if counts_bytes:
        live = live_bytes(program, timeline.activation_bytes, timeline.weight_context_bytes)
        taken = timeline.activation_bytes[program.stage]
    else:
        live = live_activations(program)
        taken = np.ones(program.num_instructions, np.int64)
    taken = np.where(program.op == Op.FORWARD, taken, 0)
    return [_curve(timeline, rank, live, taken, counts_bytes) for rank in range(timeline.num_ranks)]


def _curve(
    timeline: Timeline, rank: int, live: NDArray[np.int64], taken: NDArray[np.int64], is_bytes: bool
) -> MemoryCurve:
    """Two steps per computation: what is alive while it runs, and what it leaves behind."""
    rows = timeline.compute_rows(rank)
    if not len(rows):
        return MemoryCurve(np.zeros(1), np.zeros(1, np.int64), is_bytes)
    # What a row leaves behind is what its successor finds, before that one takes anything.
    after = np.append((live[rows] - taken[rows])[1:], 0)
    time_s = np.column_stack([timeline.start_s[rows], timeline.end_s[rows]])
    alive = np.column_stack([live[rows], after])
    # Of a pair that starts and ends together, the first has no end and the second no start of its own.
    joined = timeline.program.joined[rows]
    alive[:-1, 0] = np.where(joined[:-1], np.maximum(live[rows][:-1], live[rows][1:]), alive[:-1, 0])
    keep = np.column_stack([~np.append(False, joined[:-1]), ~joined])
    # Measured ends may pass the next start by a clock tick.
    return MemoryCurve(np.maximum.accumulate(time_s[keep]), alive[keep].astype(np.int64), is_bytes)
