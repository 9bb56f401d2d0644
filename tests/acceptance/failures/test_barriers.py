"""DeepSpeed's streams on processes with blocking messages, where all ranks wait for each other after every step."""

import pytest
import torch
import torch.distributed as dist

from penstock.ir.formats.deepspeed_streams import Listing, streams
from penstock.schedules import build

RANKS = 4


def run_streams(rank, found):
    """Run a stream with its own buffers; return what was computed, as (kind, microbatch)."""
    held, computed, num_loaded = {}, [], 0
    for step in found[rank].steps:
        for word in step:
            code, buffer = word.rstrip("0123456789"), word.lstrip("ABCDEFGLOPRST")
            if code == "L" and rank == 0:
                held[buffer] = torch.tensor(num_loaded)
                num_loaded += 1
            elif code in ("F", "B"):
                computed.append((code, int(held[buffer])))
            elif code in ("SA", "SG"):
                dist.send(held[buffer], rank + (1 if code == "SA" else -1))
            elif code in ("RA", "RG"):
                held[buffer] = torch.tensor(-1)
                dist.recv(held[buffer], rank + (1 if code == "RG" else -1))
        dist.barrier()
    return computed


@pytest.mark.feature("B15")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "listing"),
    [
        ("1f1b", Listing.TRAIN),
        ("1f1b", Listing.TRAIN_OLD),
        ("gpipe", Listing.TRAIN),
        ("forward-only", Listing.INFERENCE),
    ],
)
@pytest.mark.parametrize("microbatches", [2, 7])
def test_a_barrier_after_every_step_does_no_harm(four_ranks, family, listing, microbatches):
    schedule = build(family, ranks=RANKS, microbatches=microbatches)

    computed = four_ranks.run(run_streams, streams(schedule, listing))

    assert computed == [[(action.kind.letter, action.microbatch) for action in order] for order in schedule]
