"""`forward-only`: every microbatch forward, no backward; evaluation and inference.

    4 ranks, 6 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 0F4 0F5
        1F0 1F1 1F2 1F3 1F4 1F5
        2F0 2F1 2F2 2F3 2F4 2F5
        3F0 3F1 3F2 3F3 3F4 3F5

With several stages per rank (stage s on rank s mod p) a rank runs all microbatches of a stage before the next stage.
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Options
from penstock.schedules.phases import RankOrder, f, phases, repeat


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run all microbatches of each stage of the rank."""
    stages = range(rank, shape.num_stages, shape.num_ranks)
    return phases(*[repeat(shape.num_microbatches, f(stage)) for stage in stages])


FAMILY = Family(
    name="forward-only",
    summary="forwards alone",
    source="evaluation and inference",
    placement="line, or loop with several stages per rank",
    restrictions="any number of stages per rank",
    bubble="(p-1)F",
    memory="1",
    advice="evaluation; Pipeline.evaluate derives its own from the training schedule",
    generate=by_rank("forward-only", order),
    stages_per_rank=(1, 0),
)
