"""Simulated times of schedules, and published ones."""

import json
from pathlib import Path

from penstock.planning import prove_and_lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

DATA = Path(__file__).parents[1] / "data"
UNIT = (1, 1, 1)
"""Seconds of a forward, an input gradient and a weight gradient."""


def published(file):
    """The published rows of a file, for stages whose parts take one unit each."""
    return json.loads((DATA / file).read_text(encoding="utf-8"))["unit_costs"]


def timeline(name, ranks, microbatches, costs=UNIT, *, transfer=0.0, **options):
    """Prove a schedule of the registry, and simulate it."""
    forward, backward_input, backward_weight = costs
    program = prove_and_lower(build(name, ranks=ranks, microbatches=microbatches, **options))
    seconds = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    return simulate(program, Costs.uniform(**seconds, transfer=transfer))


def bubble(*shape, **options):
    """Idle time by makespan, which is the same for all ranks."""
    found = timeline(*shape, **options)
    work = set(found.work_s.tolist())
    assert len(work) == 1
    return found.makespan_s - work.pop()
