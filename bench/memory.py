"""Measure the peak of activations and buffers in a training step, Penstock's and torch's, to the byte.

    python bench/memory.py [--families 1f1b,zbv] [--ranks 4] [--microbatches 64] [--blocks 1] [--output FILE.json]
    python bench/memory.py --predicted [--families 1f1b,zb-h1,zbv] [--ranks 4] [--microbatches 16] [--blocks 1]

With --predicted, how far the peaks that the model of memory has are from those that `memory_report` counts, of all that
a rank holds. The sizes of layers are measured under the first family, and predict them all.

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
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from in_torch import COUNTERPARTS, torch_step
from on_ranks import Table, become_rank, bench_parser, comma_separated, give_rows, rows_of_ranks, write_rows
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import penstock
from penstock.ir.schedule import Schedule
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.planning import predict_peaks
from penstock.schedules import build

LENGTH = 128
DECODER = DecoderConfig(vocabulary=256, width=256, layers=1, heads=4, key_value_heads=4, hidden=688, length=LENGTH)
"""But for its number of layers."""
BUDGET = 0.6
"""Of torch's peak, on the rank where it is largest."""
NUM_STEPS = 2
MARK = "the step that counts"
MIB = 2**20
RANK_BY_RANK, LEFT = 28, 13
COLUMNS = {"family": 17, "Penstock, rank by rank": RANK_BY_RANK, "torch, rank by rank": RANK_BY_RANK, "ratio": 6}
COLUMNS |= {"left": LEFT, "left by torch": LEFT, "": 6}
PREDICTED_BUDGET = 0.05
"""On every rank."""
RECOMPUTED = "+recompute"
"""Behind a family's name: all its forwards run again."""
PREDICTED_COLUMNS = {"schedule": 17, "measured, rank by rank": 28, "predicted": 28, "furthest off": 12, "": 6}
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


@dataclass(frozen=True)
class PredictedRow:
    """One schedule; bytes per rank."""

    schedule: str
    measured_bytes: list[int]
    predicted_bytes: list[int]

    @property
    def error(self) -> float:
        """Of the rank where it is largest."""
        pairs = zip(self.predicted_bytes, self.measured_bytes, strict=True)
        return max((predicted / measured - 1 for predicted, measured in pairs), key=abs)


def predict(names: Sequence[str], num_microbatches: int, num_blocks: int) -> Iterator[dict[str, Any]]:
    """Measure and predict on this rank; all ranks get the same rows."""
    schedules = {name: schedule_named(name, num_microbatches) for name in names}
    most_stages = max(schedule.num_stages for schedule in schedules.values())
    tokens, target = batch_of(num_microbatches)
    layer_bytes: dict[str, Any] = {}
    for name, schedule in schedules.items():
        specs = decoder_layers(DECODER.model_copy(update={"layers": num_blocks * most_stages}))
        with closing(Pipeline(specs, schedule, loss=cross_entropy_loss)) as pipeline:
            zero([layer for stage in pipeline.stages for layer in stage.layers.values()])
            report = pipeline.memory_report(tokens, target=target)
            if not layer_bytes:
                split = [pipeline.memory_report(tokens, target=target, split_backwards=True) for _ in range(2)][-1]
                layer_bytes = dict(split.layer_bytes)
            else:  # the first step of a schedule that splits backwards still keeps what later ones do not
                report = pipeline.memory_report(tokens, target=target)
            predicted = predict_peaks(pipeline.program, pipeline.layers_of_stage, layer_bytes)
        yield asdict(PredictedRow(name, [rank.counted_bytes for rank in report.ranks], list(predicted)))


def schedule_named(name: str, num_microbatches: int) -> Schedule:
    """A family, or one whose forwards all run again."""
    schedule = build(name.removesuffix(RECOMPUTED), ranks=dist.get_world_size(), microbatches=num_microbatches)
    return penstock.with_recompute(schedule) if name.endswith(RECOMPUTED) else schedule


def batch_of(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence for each microbatch, and the tokens that follow."""
    batch = torch.randint(
        DECODER.vocabulary, (num_microbatches, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def measure(families: Sequence[str], num_microbatches: int, num_blocks: int) -> Iterator[dict[str, Any]]:
    """Measure on this rank; all ranks get the same rows."""
    tokens, target = batch_of(num_microbatches)
    for family in families:
        options = COUNTERPARTS[family].options
        schedule = build(family, ranks=dist.get_world_size(), microbatches=num_microbatches, **options)
        specs = decoder_layers(DECODER.model_copy(update={"layers": num_blocks * schedule.num_stages}))
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


def predicted_cells(row: PredictedRow) -> list[str]:
    peaks = [" ".join(f"{each / MIB:.1f}" for each in peaks) for peaks in (row.measured_bytes, row.predicted_bytes)]
    return [row.schedule, *peaks, f"{row.error:+.1%}", "" if abs(row.error) <= PREDICTED_BUDGET else "MISSED"]


def main() -> int:
    """Print one line per schedule; return 1 when a budget is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--predicted", action="store_true", help="compare predicted peaks with measured ones")
    parser.add_argument("--families", type=comma_separated)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--blocks", type=int, default=1, help="of the decoder, per stage")
    arguments = parser.parse_args()
    recomputed = [f"1f1b{RECOMPUTED}"] if hasattr(penstock, "with_recompute") else []
    usual = ["1f1b", "zb-h1", "zbv", *recomputed] if arguments.predicted else ["1f1b", "zbv"]
    families = arguments.families or usual
    microbatches = arguments.microbatches or (16 if arguments.predicted else 64)
    if arguments.rows:
        become_rank(measures_time=False)
        work = predict if arguments.predicted else measure
        give_rows(arguments.rows, work(families, microbatches, arguments.blocks))
        return 0
    print(f"torch {torch.__version__}; MiB; {microbatches} microbatches, {arguments.blocks} blocks a stage\n")
    words = ["--families", ",".join(families), "--microbatches", str(microbatches), "--blocks", str(arguments.blocks)]
    words += ["--predicted"] * arguments.predicted
    os.environ["KINETO_LOG_LEVEL"] = QUIET
    found = rows_of_ranks(__file__, words, num_ranks=arguments.ranks)
    return show_predicted(found, arguments.output) if arguments.predicted else show(found, arguments.output)


def show_predicted(found: Sequence[dict[str, Any]], output: str | None) -> int:
    table, rows = Table(PREDICTED_COLUMNS), [PredictedRow(**row) for row in found]
    for row in rows:
        table.print(predicted_cells(row))
    write_rows(output, [asdict(row) | {"error": row.error} for row in rows])
    return int(any(abs(row.error) > PREDICTED_BUDGET for row in rows))


def show(found: Sequence[dict[str, Any]], output: str | None) -> int:
    table, rows = Table(COLUMNS), [Row(**row) for row in found]
    for row in rows:
        table.print(cells_of(row))
    write_rows(output, [asdict(row) | {"ratio": row.ratio} for row in rows])
    return int(any(row.ratio > BUDGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
