"""Measure the peak of activations and buffers in a training step, Penstock's and torch's, to the byte.

    python bench/memory.py [--families 1f1b,zbv] [--ranks 4] [--microbatches 64] [--blocks 1] [--output FILE.json]

torch's profiler notes every allocation and every release of the CPU allocator, of Python's tensors and of those that
autograd keeps alike. Their sum is taken from before the first step, gradients and batch being there already, so that
buffers that a runtime keeps between steps count; the peak is that of the second step. What is left after it shows that
nothing went by unnoticed: the losses, and what a runtime keeps.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from in_torch import COUNTERPARTS, torch_step
from on_ranks import Table, become_rank, bench_parser, comma_separated, give_rows, rows_of_ranks, write_rows
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.schedules import build

LENGTH = 128
DECODER = DecoderConfig(
    vocabulary=256, width=256, num_layers=1, num_heads=4, num_key_value_heads=4, hidden=688, max_length=LENGTH
)
"""But for its number of layers."""
BUDGET = 0.6
"""Of torch's peak, on the rank where it is largest."""
NUM_STEPS = 2
MARK = "the step that counts"
MIB = 2**20
RANK_BY_RANK, LEFT = 28, 13
COLUMNS = {"family": 17, "Penstock, rank by rank": RANK_BY_RANK, "torch, rank by rank": RANK_BY_RANK, "ratio": 6}
COLUMNS |= {"left": LEFT, "left by torch": LEFT, "": 6}
QUIET = "99"
"""The level of torch's profiler that says nothing."""


@dataclass(frozen=True)
class Row:
    """One schedule; bytes per rank."""

    family: str
    microbatches: int
    peak_bytes: list[int]
    left_bytes: list[int]
    torch_peak_bytes: list[int]
    torch_left_bytes: list[int]

    @property
    def ratio(self) -> float:
        return max(self.peak_bytes) / max(self.torch_peak_bytes)


def measure(families: Sequence[str], num_microbatches: int, num_blocks: int) -> Iterator[dict[str, Any]]:
    """Measure on this rank; all ranks get the same rows."""
    batch = torch.randint(
        DECODER.vocabulary, (num_microbatches, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    tokens, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    for family in families:
        options = COUNTERPARTS[family].options
        schedule = build(family, ranks=dist.get_world_size(), microbatches=num_microbatches, **options)
        specs = decoder_layers(replace(DECODER, num_layers=num_blocks * schedule.num_stages))
        layers = [spec() for spec in specs]
        with closing(Pipeline(specs, schedule, loss=cross_entropy_loss)) as pipeline:
            zero([layer for stage in pipeline.stages for layer in stage.layers.values()])
            ours = gathered(lambda pipeline=pipeline: pipeline.step(tokens, target=target))
            parts = pipeline.layers_of_stage
        zero(layers)
        step = torch_step(family, schedule, layers, parts, cross_entropy_loss)
        theirs = gathered(lambda step=step: step(tokens, target))
        yield asdict(Row(family, num_microbatches, *ours, *theirs))


def zero(modules: Sequence[nn.Module]) -> None:
    """Have gradients there before anything is counted."""
    for parameter in nn.ModuleList(modules).parameters():
        parameter.grad = torch.zeros_like(parameter)


def gathered(step: Callable[[], object]) -> tuple[list[int], list[int]]:
    """Peak and rest in bytes, per rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, peak_and_rest_bytes(step))
    peaks, rests = zip(*everyone, strict=True)
    return list(peaks), list(rests)


def peak_and_rest_bytes(step: Callable[[], object]) -> tuple[int, int]:
    """Count all that is allocated and released from the first step on."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(NUM_STEPS - 1):
            step()
        with record_function(MARK):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    begin = next(event["ts"] for event in events if event.get("name") == MARK)
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    peak = alive = 0
    for moment, num_bytes in sorted(changes, key=itemgetter(0)):
        alive += num_bytes
        if moment >= begin:
            peak = max(peak, alive)
    return peak, alive


def cells_of(row: Row) -> list[str]:
    peaks = [" ".join(f"{each / MIB:.1f}" for each in peaks) for peaks in (row.peak_bytes, row.torch_peak_bytes)]
    left = [f"{max(each) / MIB:.1f}" for each in (row.left_bytes, row.torch_left_bytes)]
    return [row.family, *peaks, f"{row.ratio:.3f}", *left, "" if row.ratio <= BUDGET else "MISSED"]


def main() -> int:
    """Print one line per schedule; return 1 when a budget is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--families", type=comma_separated, default=["1f1b", "zbv"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1, help="of the decoder, per stage")
    arguments = parser.parse_args()
    if arguments.rows:
        become_rank(measures_time=False)
        give_rows(arguments.rows, measure(arguments.families, arguments.microbatches, arguments.blocks))
        return 0
    print(f"torch {torch.__version__}; MiB; {arguments.microbatches} microbatches, {arguments.blocks} blocks a stage\n")
    table = Table(COLUMNS)
    words = ["--families", ",".join(arguments.families), "--microbatches", str(arguments.microbatches)]
    words += ["--blocks", str(arguments.blocks)]
    os.environ["KINETO_LOG_LEVEL"] = QUIET
    rows = [Row(**row) for row in rows_of_ranks(__file__, words, num_ranks=arguments.ranks)]
    for row in rows:
        table.print(cells_of(row))
    write_rows(arguments.output, [asdict(row) | {"ratio": row.ratio} for row in rows])
    return int(any(row.ratio > BUDGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
