"""`1f1b`: a few forwards, then one forward and one backward in turn (PipeDream-flush, arXiv 2006.09503; DAPPLE).

    4 ranks, 6 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5

Rank s warms up with min(m, p-s-1) forwards; `warmup=eager` with min(m, 2(p-s-1)), which hides slow transfers for more
memory (the order of PiPPy's 1F1B).
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Choice, Options
from penstock.schedules.phases import RankOrder, b, f, phases, repeat


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run warm-up forwards, then F and B in turn, then the backwards that are left."""
    factor = 2 if options.word("warmup") == "eager" else 1
    warmup = min(shape.num_microbatches, factor * (shape.num_ranks - rank - 1))
    return phases(
        repeat(warmup, f(rank)),
        repeat(shape.num_microbatches - warmup, f(rank), b(rank)),
        repeat(warmup, b(rank)),
    )


FAMILY = Family(
    name="1f1b",
    summary="one forward and one backward in turn",
    source="PipeDream-flush, arXiv 2006.09503; DAPPLE, arXiv 2007.01045",
    placement="line",
    restrictions="one stage per rank",
    bubble="(p-1)(F+B+W)",
    memory="min(m, p-s); eager: min(m, 2(p-s)-1)",
    advice="the safe default: the bubble of gpipe with activations for p instead of m microbatches",
    generate=by_rank("1f1b", order),
    options={
        "warmup": Choice(
            "standard",
            ("standard", "eager"),
            "forwards before the first turn on rank s: standard p-s-1, eager 2(p-s-1), which hides slow transfers",
        )
    },
)
