"""`interleaved-1f1b`: 1F1B over a loop of stages, one group of microbatches after the other (arXiv 2104.04473).

    3 ranks with 2 stages each, 6 microbatches: the order of each rank

        0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 3B0 0F5 3B1 3F3 3B2 3F4 0B0 3F5 0B1 0B2 3B3 3B4 3B5 0B3 0B4 0B5
        1F0 1F1 1F2 4F0 4F1 4F2 4B0 1F3 4B1 1F4 4B2 1F5 1B0 4F3 1B1 4F4 1B2 4F5 4B3 4B4 4B5 1B3 1B4 1B5
        2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2F3 2B0 2F4 2B1 2F5 2B2 5F3 5B3 5F4 5B4 5F5 5B5 2B3 2B4 2B5

A group of g microbatches runs on a rank's first stage, then on its second, and so on, and back in the other order; the
turns are those of `interleaving`. With v stages per rank, rank s warms up with (v-1)g + 2(p-s-1) forwards, as in
Megatron-LM. A last group that is shorter leaves a part of its turns empty; PyTorch's groups, of m / max(1, m // p),
avoid that for a longer warm-up.

A `group_size` below p saves memory, at the price of waiting: the rank then warms up with (v-1)g + p-s-1 forwards, since
with the longer warm-up its first forward of a second stage and its backwards would wait for each other.
"""

from penstock.ir.schedule import Schedule
from penstock.schedules.family import Family, Shape
from penstock.schedules.interleaving import Groups, interleave
from penstock.schedules.options import Number, Options, flag


def generate(shape: Shape, options: Options) -> Schedule:
    """Order warm-up forwards, then F and B in turn, then the backwards that are left."""
    groups = Groups.of_size(options.number("group_size", shape.num_ranks), shape)
    is_short = len(groups.sizes) > 1 and groups.sizes[0] < shape.num_ranks
    skew = None if options.is_on("all_forward_first") else 1 if is_short else 2
    return interleave("interleaved-1f1b", shape, groups, skew)


FAMILY = Family(
    name="interleaved-1f1b",
    summary="1f1b with several stages per rank",
    source="Megatron-LM, arXiv 2104.04473; groups of other sizes: Llama 3, arXiv 2407.21783",
    placement="loop",
    restrictions="any number of stages per rank, any total number of stages, any number of microbatches",
    bubble="(p-1)(F+B+W) of stages that are v times smaller than 1f1b's; more if a group, such as the last, is below p",
    memory="at most min(vm, (v-1)g + 2(p-s) - 1), in stages, for groups of g >= p, and as much where g divides m; "
    "(v-1)g + p - s if p/2 <= g < p <= m",
    advice="few microbatches per rank and a fast network: a v-th of 1f1b's bubble for v times the messages",
    generate=generate,
    stages_per_rank=(2, 0),
    options={
        "group_size": Number(
            "p",
            "microbatches that run on a stage before the next one of the rank; below p less memory, a longer bubble",
        ),
        "all_forward_first": flag("run all forwards before all backwards, as Megatron-LM once did where m = p"),
    },
    example=(3, 6),
)
