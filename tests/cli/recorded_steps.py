"""Recorded steps without a run: simulated, and passed off as measured."""

from dataclasses import replace

from penstock.ir.measured import Prologue
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

LAYERS_PER_STAGE = 4


def recorded_step(schedule=None, *, forward_s=(1.0,), late_s=0.0, uncertainty_s=0.0, **costs):
    """A step of 4 ranks with 4 layers a stage; a backward takes twice a forward, and rank 1 comes late."""
    schedule = schedule or build("1f1b", ranks=4, microbatches=8)
    program = lower(schedule)
    given = Costs(forward_s=forward_s, backward_s=tuple(2 * seconds for seconds in forward_s), **costs)
    if schedule.kind.max() > 1 and not given.backward_input_s:
        given = replace(given, backward_input_s=forward_s, backward_weight_s=forward_s)
    played = simulate(program, given)
    usual, late = Prologue(-3.0 - late_s, -2.0 - late_s, -1.0 - late_s), Prologue(-3.0 - late_s, -2.0 - late_s, -1.0)
    place_of = {stage: place for route in program.placement.routes for place, stage in enumerate(route)}
    parts = [
        range(LAYERS_PER_STAGE * place_of[stage], LAYERS_PER_STAGE * (place_of[stage] + 1))
        for stage in range(program.num_stages)
    ]
    return Timeline(
        program,
        "measured",
        played.start_s,
        played.end_s,
        clock_uncertainty_s=uncertainty_s,
        step=20,
        message_bytes=(0,) * program.num_stages,
        layers_of_stage=tuple(parts),
        layer_weights=(1.0,) * max(part.stop for part in parts),
        prologues=tuple(late if rank == 1 else usual for rank in range(program.num_ranks)),
    )
