"""Programs drawn by hand, and times by the text of instructions."""

from dataclasses import replace

import numpy as np

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from tests.support.actions import parse_action


def drawn(*lines, placement=None, num_microbatches=1, num_slices=1, route_of_microbatch=None, **options):
    """The program of a schedule drawn with one line per rank."""
    orders = [[parse_action(text) for text in line.split()] for line in lines]
    where = placement or Placement.line(len(lines))
    schedule = Schedule.from_actions(
        "drawn",
        where,
        orders,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        route_of_microbatch=route_of_microbatch,
    )
    return lower(schedule, **options)


def sharded(*lines):
    """A program with UNSHARD and the like, one line per rank."""
    return Program.from_csv("\n".join(",".join(line.split()) for line in lines), name="sharded")


def later(timeline, seconds, **changes):
    """The same timeline as if it was measured, with its rows so many seconds later."""
    start_s, end_s = timeline.start_s + seconds, timeline.end_s + seconds
    return replace(timeline, source="measured", start_s=start_s, end_s=end_s, **changes)


def late_ranks(timeline, seconds, *, first):
    """The same timeline with all from the `first` rank on later; messages to that rank come as before."""
    program = timeline.program
    later_s = np.where(program.rank_of_row >= first, seconds, 0.0)
    comes = (program.op == Op.RECEIVE_FORWARD) & (program.rank_of_row == first)
    return replace(timeline, start_s=timeline.start_s + later_s, end_s=timeline.end_s + np.where(comes, 0.0, later_s))


def starts(timeline, column="start_s"):
    """Start of every instruction by its text."""
    times = getattr(timeline, column).tolist()
    return {str(timeline.program.instruction(row)): time for row, time in enumerate(times)}


def ends(timeline):
    return starts(timeline, "end_s")


def row_of(program, text):
    """The row of an instruction, by its text."""
    return next(row for row in range(program.num_instructions) if str(program.instruction(row)) == text)
