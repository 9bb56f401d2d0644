"""`looped-bfs`: all microbatches of a rank's first stage, then of its next; back in reverse (arXiv 2211.05953).

    4 ranks with 2 stages each, 6 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 0F4 0F5 4F0 4F1 4F2 4F3 4F4 4F5 4B0 4B1 4B2 4B3 4B4 4B5 0B0 0B1 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1F3 1F4 1F5 5F0 5F1 5F2 5F3 5F4 5F5 5B0 5B1 5B2 5B3 5B4 5B5 1B0 1B1 1B2 1B3 1B4 1B5
        2F0 2F1 2F2 2F3 2F4 2F5 6F0 6F1 6F2 6F3 6F4 6F5 6B0 6B1 6B2 6B3 6B4 6B5 2B0 2B1 2B2 2B3 2B4 2B5
        3F0 3F1 3F2 3F3 3F4 3F5 7F0 7F1 7F2 7F3 7F4 7F5 7B0 7B1 7B2 7B3 7B4 7B5 3B0 3B1 3B2 3B3 3B4 3B5

A stage's weights are needed for one stretch of forwards and one of backwards, so that sharded weights are gathered, and
gradients reduced, once per stage and step.
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Choice, Options
from penstock.schedules.phases import RankOrder, b, f, phases, repeat


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run F of stage after stage, then B of the stages in reverse."""
    stages = range(rank, shape.num_stages, shape.num_ranks)
    return phases(
        *[repeat(shape.num_microbatches, f(stage)) for stage in stages],
        *[repeat(shape.num_microbatches, b(stage)) for stage in reversed(stages)],
        order=options.word("backward_order"),
    )


FAMILY = Family(
    name="looped-bfs",
    summary="gpipe with several stages per rank",
    source="Breadth-First Pipeline Parallelism, arXiv 2211.05953",
    placement="loop",
    restrictions="any number of stages per rank, any total number of stages, any number of microbatches",
    bubble="(p-1)(F+B+W) of stages that are v times smaller than gpipe's, if m >= p",
    memory="vm, in stages",
    advice="sharded weights (FSDP): each stage's weights are gathered once forward and once backward; memory to spare",
    generate=by_rank("looped-bfs", order),
    stages_per_rank=(2, 0),
    options={
        "backward_order": Choice(
            "ascending",
            ("ascending", "descending"),
            "order of the microbatches in the backward phase; descending (PyTorch) frees the newest activation first",
        )
    },
)
