"""`zb-h1`: 1F1B with the backward split, in the memory of 1F1B (Zero Bubble, arXiv 2401.10241, section 2.1).

    4 ranks, 6 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
        1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1I4 1W3 1I5 1W4 1W5
        2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2I5 2W3 2W4 2W5
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3W3 3W4 3W5

Rank s warms up as in 1F1B and holds back s weight gradients. Later ranks start later and hold back more: those fill the
time in which they would wait at the end.
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Choice, Options
from penstock.schedules.phases import RankOrder, b, f, i, phases, repeat, w


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run warm-up forwards, then F, I and a late W in turn, then what is left."""
    microbatches = shape.num_microbatches
    warmup = min(microbatches, shape.num_ranks - rank - 1)
    if options.word("backward") == "whole":
        return _whole_where_possible(rank, microbatches, warmup)
    return delayed(rank, microbatches, warmup, rank)


def delayed(rank: int, microbatches: int, warmup: int, num_held: int) -> RankOrder:
    """Run so many warm-up forwards, then F, I and a W that is `num_held` late in turn, then what is left."""
    num_late = min(num_held, microbatches - warmup)
    return phases(
        repeat(warmup, f(rank)),
        repeat(num_late, f(rank), i(rank)),
        repeat(microbatches - warmup - num_late, f(rank), i(rank), w(rank)),
        repeat(warmup, i(rank), w(rank)),
        repeat(num_late, w(rank)),
    )


def _whole_where_possible(rank: int, microbatches: int, warmup: int) -> RankOrder:
    """Split only the held-back and the last backwards; where turns are few, the drain holds back the rest."""
    turns = microbatches - warmup
    num_late, late_in_drain = min(rank, turns), min(max(rank - turns, 0), warmup)
    num_whole = turns - num_late if rank == 0 else max(turns - num_late - 1, 0)
    last = (i(rank), w(rank)) if rank else (b(rank),)
    return phases(
        repeat(warmup, f(rank)),
        repeat(num_late, f(rank), i(rank)),
        repeat(num_whole, f(rank), b(rank)),
        repeat(turns - num_late - num_whole, f(rank), i(rank), w(rank)),
        repeat(late_in_drain, i(rank)),
        repeat(warmup - late_in_drain, *last),
        repeat(num_late + late_in_drain, w(rank)),
    )


FAMILY = Family(
    name="zb-h1",
    summary="1f1b with delayed weight gradients",
    source="Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    placement="line",
    restrictions="one stage per rank",
    bubble="(p-1)(F+B-W) from m = p on, with B the input gradient and W <= F",
    memory="min(m, p), of which s only as tensors saved for W",
    advice="a third of 1f1b's bubble at no more memory on the fullest rank; the first to try instead of 1f1b",
    generate=by_rank("zb-h1", order),
    options={
        "backward": Choice(
            "split",
            ("split", "whole"),
            "split: all backwards are split; whole: only where a weight gradient has to wait, which makes fewer passes "
            "but sends gradients later (the order of the authors' patch for Megatron-LM)",
        )
    },
)
