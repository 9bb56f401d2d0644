"""`gpipe`: all forwards, then all backwards (GPipe, arXiv 1811.06965).

4 ranks, 6 microbatches: the order of each rank

    0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1F3 1F4 1F5 1B0 1B1 1B2 1B3 1B4 1B5
    2F0 2F1 2F2 2F3 2F4 2F5 2B0 2B1 2B2 2B3 2B4 2B5
    3F0 3F1 3F2 3F3 3F4 3F5 3B0 3B1 3B2 3B3 3B4 3B5
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Choice, Options
from penstock.schedules.phases import RankOrder, b, f, phases, repeat


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run all F, then all B in the order that `backward_order` names."""
    return phases(
        repeat(shape.num_microbatches, f(rank)),
        repeat(shape.num_microbatches, b(rank)),
        order=options.word("backward_order"),
    )


FAMILY = Family(
    name="gpipe",
    summary="all forwards, then all backwards",
    source="GPipe, arXiv 1811.06965",
    placement="line",
    restrictions="one stage per rank",
    bubble="(p-1)(F+B+W)",
    memory="m",
    advice="few microbatches, or memory to spare; the fewest changes of direction on the wire",
    generate=by_rank("gpipe", order),
    options={
        "backward_order": Choice(
            "ascending",
            ("ascending", "descending"),
            "order of the microbatches in the backward phase; descending frees the newest activation first",
        )
    },
)
