"""`seq1f1b`: 1F1B over slices of the sequence instead of whole microbatches (Seq1F1B, arXiv 2406.03488).

4 ranks, 3 microbatches, 2 slices: the order of each rank, `.1` for slice 1

    0F0   0F0.1 0F1   0F1.1 0F2   0B0.1 0F2.1 0B0   0B1.1 0B1   0B2.1 0B2
    1F0   1F0.1 1F1   1F1.1 1B0.1 1F2   1B0   1F2.1 1B1.1 1B1   1B2.1 1B2
    2F0   2F0.1 2F1   2B0.1 2F1.1 2B0   2F2   2B1.1 2F2.1 2B1   2B2.1 2B2
    3F0   3F0.1 3B0.1 3F1   3B0   3F1.1 3B1.1 3F2   3B1   3F2.1 3B2.1 3B2

Slices go forward from the first to the last, since attention looks back, and backward from the last to the first. With
k slices, rank s warms up with min(mk, p-s-2+k) of them, so that the last rank has forwarded a whole microbatch before
its first backward. One slice is `1f1b`.
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Options
from penstock.schedules.phases import RankOrder, b, f, phases, repeat


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run warm-up forwards, then F and B of slices in turn, then the backwards that are left."""
    num_slices = shape.num_microbatches * shape.num_slices
    warmup = min(num_slices, shape.num_ranks - rank - 2 + shape.num_slices)
    return phases(
        repeat(warmup, f(rank)),
        repeat(num_slices - warmup, f(rank), b(rank)),
        repeat(warmup, b(rank)),
        slices=shape.num_slices,
    )


FAMILY = Family(
    name="seq1f1b",
    summary="1f1b over slices of the sequence",
    source="Seq1F1B, arXiv 2406.03488",
    placement="line",
    restrictions="one stage per rank; attention must be causal",
    bubble="(p-1)(F+B+W)/k with k slices",
    memory="min(mk, p-s-1+k) slices, each 1/k of a microbatch",
    advice="long sequences: both bubble and activations shrink with the number of slices",
    generate=by_rank("seq1f1b", order),
    takes_slices=True,
)
