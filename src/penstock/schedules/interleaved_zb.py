"""`interleaved-zb`: an interleaved order whose weight gradients fill the bubble (torch.distributed.pipelining).

    2 ranks with 2 stages each, 4 microbatches: the order of each rank

        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

The turns are those of `interleaving`, the groups those of `interleaved-1f1b`. With groups of g and v stages per rank,
rank s warms up with (v-1)g + p-s-1 forwards, then runs F and I in turn. A weight gradient follows s input gradients
late, as in `zb-h1`: later ranks hold back more, for the time in which they would wait at the end.
"""

from penstock.ir.schedule import Schedule
from penstock.schedules.family import Family, Shape
from penstock.schedules.interleaving import Groups, interleave
from penstock.schedules.options import Number, Options


def generate(shape: Shape, options: Options) -> Schedule:
    """Order warm-up forwards, then F, I and a delayed W in turn, then what is left."""
    is_given = "group_size" in options.given
    groups = Groups.of_size(options.number("group_size", 1), shape) if is_given else Groups.even(shape)
    return interleave("interleaved-zb", shape, groups, skew=1, held_weights=1)


FAMILY = Family(
    name="interleaved-zb",
    summary="interleaved-1f1b with delayed weight gradients",
    source="torch.distributed.pipelining; Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    placement="loop",
    restrictions="any number of stages per rank, any total number of stages, any number of microbatches",
    bubble="(p-1)(F+B-W) of a stage, with B the input gradient and W <= F; more if a group, such as the last, is "
    "below p",
    memory="at most min(vm, (v-1)g + p), in stages, of which rank s holds s as tensors saved for W only, for groups of "
    "g >= p/2, and as much if g, p <= m",
    advice="interleaved-1f1b where backwards can be split: a third of its bubble, less memory on the fullest rank",
    generate=generate,
    stages_per_rank=(2, 0),
    options={
        "group_size": Number(
            "m / max(1, m // p)",
            "microbatches that run on a stage before the next one of the rank; below p less memory, a longer bubble",
        )
    },
    example=(2, 4),
)
