"""Measure the peak of activations and buffers in a training step, Penstock's and torch's, to the byte.

    python bench/memory.py [--families 1f1b,zbv] [--ranks 4] [--microbatches 64] [--blocks 1] [--output FILE.json]
    python bench/memory.py --predicted [--families 1f1b,zb-h1,zbv] [--ranks 4] [--microbatches 16] [--blocks 1]
    python bench/memory.py --held

With --predicted, how far the peaks that the model of memory has are from those of the allocator at any moment, of all
that a rank holds. The sizes of layers are measured under the first family, and predict them all. Next to them, the
peaks that `memory_report` counts, and those of the allocator between instructions.

With --held, what is held between I and W, for every way in which a weight can wait: given out and not got back by the
allocator, and as the model has it.

torch's profiler notes every allocation and every release of the CPU allocator, of Python's tensors and of those that
autograd keeps alike. Their sum is taken from before the first step, gradients and batch being there already, so that
buffers that a runtime keeps between steps count; the peak is that of the second step. What is left after it shows that
nothing went by unnoticed: the losses, and what a runtime keeps.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from allocations import allocations_of
from in_torch import COUNTERPARTS, torch_step
from on_ranks import Table, become_rank, bench_parser, comma_separated, give_rows, rows_of_ranks, write_rows
from torch import nn
from torch.profiler import record_function
from waiting_layers import LAYERS, ROWS, WIDTH

import penstock
from penstock.errors import PenstockWarning
from penstock.execute.observing.layer_sizes import WORKSPACES
from penstock.execute.observing.memory_report import MemoryReport
from penstock.execute.observing.ranges import range_name
from penstock.ir.action import Action, Kind
from penstock.ir.live import left_bytes
from penstock.ir.operations import Op
from penstock.ir.schedule import Schedule
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.planning import predict_peaks
from penstock.schedules import build
from penstock.simulation import LayerCosts

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
SCALARS = 1024
"""Bytes of losses and the like."""
RECOMPUTED = "+recompute"
"""Behind a family's name: all its forwards run again."""
PREDICTED_COLUMNS = {"schedule": 17, "counted, rank by rank": 23, "given out": 23, "at any moment": 23, "predicted": 23}
PREDICTED_COLUMNS |= {"furthest off": 12, "": 6}
HELD_COLUMNS = {"weights": 33, "measured": 9, "predicted": 9, "ratio": 6, "": 6}
NUM_HELD, NUM_BEFORE = 3, 4
"""Microbatches that wait for W at once, and steps before the one that is measured, which find out what waits."""
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
    allocated_bytes: list[int]
    """Between instructions, by the allocator."""
    peak_bytes: list[int]
    """The same, at any moment."""
    predicted_bytes: list[int]

    @property
    def error(self) -> float:
        """Of what is given out at any moment, on the rank where it is largest."""
        pairs = zip(self.predicted_bytes, self.peak_bytes, strict=True)
        return max((predicted / peak - 1 for predicted, peak in pairs), key=abs)


@dataclass(frozen=True)
class HeldRow:
    """One way to wait; bytes of some microbatches between I and W."""

    weights: str
    measured_bytes: int
    predicted_bytes: int

    @property
    def ratio(self) -> float | None:
        """None where no weight waits, and only losses are held."""
        return self.predicted_bytes / self.measured_bytes if self.predicted_bytes else None

    @property
    def is_within_budget(self) -> bool:
        return self.measured_bytes < SCALARS if self.ratio is None else abs(self.ratio - 1) <= PREDICTED_BUDGET


def predict(names: Sequence[str], num_microbatches: int, num_blocks: int) -> Iterator[dict[str, Any]]:
    """Measure and predict on this rank; all ranks get the same rows."""
    schedules = {name: schedule_named(name, num_microbatches) for name in names}
    most_stages = max(schedule.num_stages for schedule in schedules.values())
    tokens, target = batch_of(num_microbatches)
    layer_bytes: dict[str, Any] = {}
    for name, schedule in schedules.items():
        specs = decoder_layers(DECODER.model_copy(update={"layers": num_blocks * most_stages}))
        with closing(Pipeline(specs, schedule, loss=cross_entropy_loss, ranges=True)) as pipeline:
            zero([layer for stage in pipeline.stages for layer in stage.layers.values()])
            report = pipeline.memory_report(tokens, target=target)
            if not layer_bytes:
                split = [pipeline.memory_report(tokens, target=target, split_backwards=True) for _ in range(2)][-1]
                layer_bytes = dict(split.layer_bytes)
                for field in WORKSPACES:
                    layer_bytes[field] = tuple(map(max, layer_bytes[field], report.layer_bytes[field]))
            else:  # the first step of a schedule that splits backwards still keeps what later ones do not
                report = pipeline.memory_report(tokens, target=target)
            predicted = predict_peaks(pipeline.program, pipeline.layers_of_stage, layer_bytes)
            between, peaks = allocated(pipeline, report, lambda: pipeline.step(tokens, target=target))
        yield asdict(PredictedRow(name, [rank.counted_bytes for rank in report.ranks], between, peaks, list(predicted)))


def allocated(pipeline: Pipeline, report: MemoryReport, step: Callable[[], object]) -> tuple[list[int], list[int]]:
    """Per rank, the peaks of a step between instructions and at any moment, parameters and gradients included."""
    rank, program = pipeline.rank, pipeline.program
    found = allocations_of(step)
    names = {range_name(program.instruction(row)) for row in range(*program.offsets[rank : rank + 2])}
    static = sum(stage.parameter_bytes + stage.gradient_bytes for stage in report.ranks[rank].stages)
    peaks = found.peak_bytes_after(names & found.ranges.keys()), max(num_bytes for _, num_bytes in found.levels)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [static + peak for peak in peaks])
    between, at_any_moment = zip(*everyone, strict=True)
    return list(between), list(at_any_moment)


def held() -> Iterator[HeldRow]:
    """Measure and predict what is held between I and W, way by way."""
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    order = [Action(kind, 0, microbatch) for kind in kinds for microbatch in range(NUM_HELD)]
    schedule = Schedule.from_actions("in phases", Placement.line(1), [order], num_microbatches=NUM_HELD)
    inputs, target = torch.randn(NUM_HELD * ROWS, WIDTH), torch.randn(NUM_HELD * ROWS, WIDTH)
    for name, make_layer in LAYERS.items():
        narrow = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))  # too small to wait
        layers = [narrow, make_layer()]
        with closing(Pipeline(layers, schedule, loss=nn.functional.mse_loss, ranges=True)) as pipeline:
            for _ in range(NUM_BEFORE):
                report = pipeline.memory_report(inputs, target=target)
            found = allocations_of(lambda pipeline=pipeline: pipeline.step(inputs, target=target))
            program, parts = pipeline.program, pipeline.layers_of_stage
        last = program.op.tolist().index(Op.BACKWARD_WEIGHT) - 1
        sizes = LayerCosts(**dict(report.layer_bytes)).of_stages(parts).stage_bytes(program.placement, NUM_HELD)
        measured = found.bytes_after(range_name(program.instruction(last)))
        yield HeldRow(name, measured, int(left_bytes(program, sizes)[last]))


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
    found = allocations_of(lambda: run_steps(step))
    return found.peak_bytes_in(MARK), found.rest_bytes


def run_steps(step: Callable[[], object]) -> None:
    """Run some steps, the last one in a range."""
    for _ in range(NUM_STEPS - 1):
        step()
    with record_function(MARK):
        step()


def cells_of(row: Row) -> list[str]:
    peaks = [" ".join(f"{each / MIB:.1f}" for each in peaks) for peaks in (row.peak_bytes, row.torch_peak_bytes)]
    left = [f"{max(each) / MIB:.1f}" for each in (row.left_bytes, row.torch_left_bytes)]
    return [row.family, *peaks, f"{row.ratio:.3f}", *left, "" if row.ratio <= BUDGET else "MISSED"]


def predicted_cells(row: PredictedRow) -> list[str]:
    columns = (row.measured_bytes, row.allocated_bytes, row.peak_bytes, row.predicted_bytes)
    peaks = [" ".join(f"{each / MIB:.1f}" for each in peaks) for peaks in columns]
    return [row.schedule, *peaks, f"{row.error:+.1%}", "" if abs(row.error) <= PREDICTED_BUDGET else "MISSED"]


def held_cells(row: HeldRow) -> list[str]:
    sizes = [f"{num_bytes / MIB:.3f}" for num_bytes in (row.measured_bytes, row.predicted_bytes)]
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    return [row.weights, *sizes, ratio, "" if row.is_within_budget else "MISSED"]


def main() -> int:
    """Print one line per schedule; return 1 when a budget is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--predicted", action="store_true", help="compare predicted peaks with measured ones")
    parser.add_argument("--held", action="store_true", help="compare what is held between I and W, way by way")
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
    os.environ["KINETO_LOG_LEVEL"] = QUIET
    if arguments.held:
        return show_held(arguments.output)
    print(f"torch {torch.__version__}; MiB; {microbatches} microbatches, {arguments.blocks} blocks a stage\n")
    words = ["--families", ",".join(families), "--microbatches", str(microbatches), "--blocks", str(arguments.blocks)]
    words += ["--predicted"] * arguments.predicted
    found = rows_of_ranks(__file__, words, num_ranks=arguments.ranks)
    return show_predicted(found, arguments.output) if arguments.predicted else show(found, arguments.output)


def show_predicted(found: Sequence[dict[str, Any]], output: str | None) -> int:
    table, rows = Table(PREDICTED_COLUMNS), [PredictedRow(**row) for row in found]
    for row in rows:
        table.print(predicted_cells(row))
    write_rows(output, [asdict(row) | {"error": row.error} for row in rows])
    return int(any(abs(row.error) > PREDICTED_BUDGET for row in rows))


def show_held(output: str | None) -> int:
    warnings.simplefilter("ignore", PenstockWarning)  # some weights are meant not to wait
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; MiB; {NUM_HELD} microbatches of [{ROWS}, {WIDTH}]\n")
    table, rows = Table(HELD_COLUMNS), list[HeldRow]()
    for row in held():
        table.print(held_cells(row))
        rows.append(row)
    write_rows(output, [asdict(row) | {"ratio": row.ratio} for row in rows])
    return int(not all(row.is_within_budget for row in rows))


def show(found: Sequence[dict[str, Any]], output: str | None) -> int:
    table, rows = Table(COLUMNS), [Row(**row) for row in found]
    for row in rows:
        table.print(cells_of(row))
    write_rows(output, [asdict(row) | {"ratio": row.ratio} for row in rows])
    return int(any(row.ratio > BUDGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
