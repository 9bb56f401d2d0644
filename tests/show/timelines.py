"""Timelines to draw."""

from dataclasses import replace

from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from penstock.simulation import Costs, simulate

COSTS = Costs.uniform(forward=0.010, backward_input=0.010, backward_weight=0.010, transfer=0.001)
UNIT = Costs.uniform()


def timeline_of(num_ranks, num_microbatches, name="1f1b", costs=COSTS, **options):
    return simulate(lower(build(name, ranks=num_ranks, microbatches=num_microbatches, **options)), costs)


def timeline_with_bars():
    """Two ranks, both with a copy of one parameter: a reduction takes half a second, the optimizer step then two.

    rank 0   F0 F1 .  .  B0 B0 .  .  B1 B1 =# # (to 12.5)
    rank 1   .  F0 B0 B0 F1 B1 B1 .  .  .  =# # (reduced with rank 0)
    """
    program = lower(build("1f1b", ranks=2, microbatches=2), tied_groups=[(0, 1)], optimizer_step=True)
    costs = replace(UNIT, tied_reduce_s=(0.5,), optimizer_s=(2.0,))
    return simulate(program, costs)


def paired_timeline():
    """One rank that runs 0F0, then 0F1 and 0B0 together, then 0B1."""
    pair = OverlappedPair(Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0))
    order = [Action(Kind.FORWARD, 0, 0), pair, Action(Kind.BACKWARD, 0, 1)]
    schedule = Schedule.from_actions("pair", Placement.line(1), [order], num_microbatches=2)
    return simulate(Program.from_schedule(schedule), UNIT)
