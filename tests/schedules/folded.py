"""What the tests of the two DualPipes, Chimera and Hanayo have in common: published rows, and what is idle in time."""

import json
from pathlib import Path

from penstock.planning import prove_and_lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_dualpipe.json").read_text(encoding="utf-8"))


def published(name):
    """The published rows of a family."""
    return [row for row in PUBLISHED["unit_costs"] if row["schedule"] == name]


def timeline(name, ranks, microbatches, *, forward=1.0, backward=2.0, **options):
    """What a schedule does in time once it is proved; half of a backward is its weight gradient."""
    costs = Costs.uniform(forward=forward, backward_input=backward / 2, backward_weight=backward / 2)
    return simulate(prove_and_lower(build(name, ranks=ranks, microbatches=microbatches, **options)), costs)


def bubble(*shape, **costs_and_options):
    """How long ranks are idle, which is the same for all of them."""
    found = timeline(*shape, **costs_and_options)
    work = set(found.work_s.tolist())
    assert len(work) == 1
    return found.makespan_s - work.pop()
