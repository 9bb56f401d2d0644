"""`group-interleaved`: an interleaved order in as little memory as groups of microbatches allow (arXiv 2503.01328).

    2 ranks with 2 stages each, 4 microbatches: the order of each rank

        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1F3 1I1 1W1 3F2 3I2 3W2 3F3 3I3 3W3 1I2 1W2 1I3 1W3

The turns are those of `interleaving`. With groups of g >= p/2 and v stages per rank, rank s warms up with (v-1)g +
p-s-1 forwards, where `interleaved-1f1b` has p-s-1 more. Each backward is split, W right after I, so that the rank
before gets its gradient early. That is what lets groups be small: p input gradients, once around the loop, take no more
time than g whole turns. Groups below p/2 put off their next stage, and save no more memory.
"""

from penstock.ir.schedule import Schedule
from penstock.schedules.family import Family, Shape
from penstock.schedules.interleaving import Groups, interleave
from penstock.schedules.options import Number, Options


def generate(shape: Shape, options: Options) -> Schedule:
    """Order warm-up forwards, then F, I and W in turn, then the backwards that are left."""
    groups = Groups.of_size(options.number("group_size", shape.num_ranks), shape)
    return interleave("group-interleaved", shape, groups, skew=1, held_weights=0)


FAMILY = Family(
    name="group-interleaved",
    summary="interleaved-1f1b in less memory",
    source="PipeOffload, arXiv 2503.01328",
    placement="loop",
    restrictions="any number of stages per rank, any total number of stages, any number of microbatches",
    bubble="(p-1)(F+B) of a stage, with B the input gradient, if all groups, also the last, have p or more; "
    "(p-g)(v-1)F more for p/2 <= g < p, F=B=W, if g divides m",
    memory="at most min(vm, (v-1)g + p - s), in stages, for groups of g >= p/2, and as much if g, p <= m",
    advice="interleaving in less memory: group_size=p holds p - 1 stages less than interleaved-1f1b, "
    "group_size=p/2 about half",
    generate=generate,
    stages_per_rank=(2, 0),
    options={"group_size": Number("p", "microbatches that run on a stage before the rank's next stage")},
    example=(2, 4),
)
