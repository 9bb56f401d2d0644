"""A custom schedule, in three forms: a function, a schedule made of it, and a family with a name.

penstock show --function examples/own_schedule.py:in_groups --ranks 4 --microbatches 8
penstock compare gpipe 1f1b --function examples/own_schedule.py:in_groups:size=2 --ranks 4 --microbatches 8
python examples/own_schedule.py
"""

import penstock as ps
from penstock.schedules import Family, Number


def in_groups(ranks, microbatches, size=4):
    """GPipe on one group of microbatches after the other: the memory of a group, and a bubble for each."""
    for rank in range(ranks):
        row = []
        for first in range(0, microbatches, size):
            group = range(first, min(first + size, microbatches))
            row += [f"{rank}F{microbatch}" for microbatch in group]
            row += [f"{rank}B{microbatch}" for microbatch in group]
        yield row


FAMILY = Family(
    name="in-groups",
    summary="gpipe on one group of microbatches after the other",
    source="examples/own_schedule.py",
    placement="line",
    restrictions="one stage per rank",
    bubble="(p-1)(F+B+W) for each group",
    memory="min(m, size)",
    advice="an example to start from",
    generate=lambda shape, options: in_groups(shape.num_ranks, shape.num_microbatches, options.number("size", 4)),
    options={"size": Number("4", "microbatches of a group")},
)

if __name__ == "__main__":
    schedule = ps.build(in_groups, ranks=4, microbatches=8, size=2)
    ps.check(schedule)
    timeline = ps.simulate(ps.lower(schedule), ps.Costs.uniform())
    print(timeline, "peak activations", timeline.peak_activations)
