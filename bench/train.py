"""Measure training of one decoder in tokens per second: Penstock, torch's own pipelines, and data parallel.

    python bench/train.py [--families 1f1b,zbv] [--rounds 10] [--output FILE.json]
    python bench/train.py --shards

Two ranks with a thread each, over gloo, take turns at the same batch: forward, backward, no optimizer. Against torch,
Penstock runs each schedule in torch's order with the same split, by the operations of the layers. Against data parallel
it runs with the split that `measure_layers` gives, and may choose its schedule. Data parallel is torch's
DistributedDataParallel, half a batch a rank, in microbatches of the same size; beside it stands half a batch as one,
whose products are larger. With layers that Inductor has compiled, Penstock's zbv runs against torch's 1F1B: torch
splits no compiled backward.

With --shards, 2 x 2 ranks train with shards over two replicas, against torch's FSDP2 around the stages of its 1F1B:
tokens per second, and the peak that the allocator gives out in a step.
"""

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from in_torch import COUNTERPARTS, torch_step
from on_ranks import (
    Table,
    become_rank,
    bench_parser,
    comma_separated,
    give_rows,
    in_turn,
    paired_ratio,
    rows_of_ranks,
    spread_of,
    with_spread,
    write_rows,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_shards import OURS, SIZES, THEIRS, ShardRow, measure_shards

from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.partition.split import split_over
from penstock.pipeline import Pipeline
from penstock.schedules import build
from penstock.train.measuring.measure import measure_layers

NUM_RANKS = 2
MICROBATCHES = 8
DECODER = DecoderConfig(vocabulary=256, width=256, layers=8, heads=4, key_value_heads=4, hidden=688, length=128)
BATCH, LENGTH = 16, 128
NUM_TOKENS = BATCH * LENGTH
PLAIN = ("1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb", "zbv", "v-zb")
FINER = ("interleaved-1f1b", "interleaved-zb")
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in PLAIN},
    **{f"{family} with 4 stages a rank": (family, {"stages_per_rank": 4}) for family in FINER},
}
"""What is tried against data parallel: families and their options."""
TORCH_BUDGET, DATA_PARALLEL_BUDGET = 1.03, 0.93
"""Tokens per second over torch's, on each schedule; over data parallel's, with the best one."""

FSDP2 = next(iter(THEIRS))
SHARD_RATE, SHARD_BYTES = 1.0, 0.8
"""Tokens per second and peak bytes with shards, over those of FSDP2 whose layers stay whole within a step."""

DATA_PARALLEL = "data parallel"
COMPILED = "zbv compiled, torch's 1f1b compiled"

COLUMNS = {"": 46, "split": 15, "tokens/s": 13, "torch": 13, "ratio": 6}

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Way:
    """One way of training, to be measured."""

    name: str
    step: Step
    split: str = ""
    has_measured_split: bool = False
    """Whether layers were spread over the stages by the times that they take."""
    in_torch: Step | None = None
    """The same schedule and split in torch, to compare with; else data parallel is."""


@dataclass(frozen=True)
class Row:
    """What was measured of one way of training."""

    name: str
    split: str
    has_measured_split: bool
    ratio: float
    """Over what it is compared with, which is torch on the same schedule or data parallel: the median of the rounds."""
    tokens_per_s: float
    spread: float
    """The middle half of the steps, as a share of the median."""
    torch_tokens_per_s: float | None = None
    """None where it is compared with data parallel."""
    torch_spread: float | None = None


def measure(families: Sequence[str], tried: Sequence[str], num_rounds: int) -> Iterator[dict[str, Any]]:
    """Measure everything in turn on this rank; all ranks get the same rows."""
    batch = torch.randint(DECODER.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    one = tokens[: BATCH // MICROBATCHES], target[: BATCH // MICROBATCHES]
    weights = measure_layers(decoder_layers(DECODER), one[:1], target=one[1], loss=cross_entropy_loss).weights
    ways = [*same_schedules(families), compiled(), *candidates(tried, weights), *data_parallel_ways()]
    turns = {way.name: partial(way.step, tokens, target) for way in ways}
    turns |= {f"torch {way.name}": partial(way.in_torch, tokens, target) for way in ways if way.in_torch is not None}
    seconds = in_turn(turns, num_rounds)
    for way in ways:
        own, theirs = seconds[way.name], seconds.get(f"torch {way.name}")
        ratio = paired_ratio(theirs or seconds[DATA_PARALLEL], own)
        yield asdict(
            Row(way.name, way.split, way.has_measured_split, ratio, *rate(own), *(rate(theirs) if theirs else ()))
        )


def rate(seconds: Sequence[float]) -> tuple[float, float]:
    """Median tokens per second, and the spread."""
    return NUM_TOKENS / statistics.median(seconds), spread_of(seconds)


def same_schedules(families: Sequence[str]) -> Iterator[Way]:
    """Schedules that torch has too."""
    specs = decoder_layers(DECODER)
    layers = [spec() for spec in specs]  # all use these in place, and none changes a weight
    for family in families:
        schedule = build(family, ranks=NUM_RANKS, microbatches=MICROBATCHES, **COUNTERPARTS[family].options)
        pipeline = Pipeline(layers, schedule, loss=cross_entropy_loss, weights=[spec.weight for spec in specs])
        in_torch = torch_step(family, schedule, layers, pipeline.layers_of_stage, cross_entropy_loss)
        yield Way(family, step_of(pipeline), sizes(pipeline), in_torch=in_torch)


def compiled() -> Way:
    """Both with compiled layers, each with its best schedule for them."""
    specs = decoder_layers(DECODER)
    weights = [spec.weight for spec in specs]
    theirs = [spec() for spec in specs]
    for layer in theirs:
        layer.compile()
    schedule = build("1f1b", ranks=NUM_RANKS, microbatches=MICROBATCHES)
    layers_of_stage = split_over(schedule.placement, len(specs), weights=weights)
    in_torch = torch_step("1f1b", schedule, theirs, layers_of_stage, cross_entropy_loss)
    pipeline = Pipeline(specs, "zbv", MICROBATCHES, cross_entropy_loss, weights=weights, compile=True)
    return Way(COMPILED, step_of(pipeline), sizes(pipeline), in_torch=in_torch)


def candidates(tried: Sequence[str], weights: Sequence[float]) -> Iterator[Way]:
    """What is tried against data parallel."""
    layers = [spec() for spec in decoder_layers(DECODER)]
    for name in tried:
        family, options = CANDIDATES[name]
        schedule = build(family, ranks=NUM_RANKS, microbatches=MICROBATCHES, **options)
        pipeline = Pipeline(layers, schedule, loss=cross_entropy_loss, weights=weights)
        yield Way(f"{name}, measured", step_of(pipeline), sizes(pipeline), has_measured_split=True)


def step_of(pipeline: Pipeline) -> Step:
    return lambda tokens, target: pipeline.step(tokens, target=target)


def sizes(pipeline: Pipeline) -> str:
    return " ".join(str(len(part)) for part in pipeline.layers_of_stage)


def data_parallel_ways() -> list[Way]:
    """Both ways of training half a batch on each rank."""
    model = DistributedDataParallel(nn.Sequential(*(layer() for layer in decoder_layers(DECODER))))

    def step(num_microbatches: int, tokens: Tensor, target: Tensor) -> None:
        rank = torch.distributed.get_rank()
        own = [part.chunk(NUM_RANKS)[rank].chunk(num_microbatches) for part in (tokens, target)]
        for number, (inputs, wanted) in enumerate(zip(*own, strict=True), start=1):
            with nullcontext() if number == num_microbatches else model.no_sync():
                (cross_entropy_loss(model(inputs), wanted) / num_microbatches).backward()

    counts = {DATA_PARALLEL: MICROBATCHES // NUM_RANKS, f"{DATA_PARALLEL}, one microbatch": 1}
    return [Way(name, partial(step, count)) for name, count in counts.items()]


def torch_text(row: Row) -> str:
    if row.torch_tokens_per_s is None or row.torch_spread is None:
        return ""
    return with_spread(f"{row.torch_tokens_per_s:.0f}", row.torch_spread)


def report(rows: Sequence[Row]) -> bool:
    """Print the table; say whether both budgets are kept."""
    table = Table(COLUMNS)
    for row in rows:
        ours = with_spread(f"{row.tokens_per_s:.0f}", row.spread)
        table.print([row.name, row.split, ours, torch_text(row), f"{row.ratio:.3f}"])
    same = [row.ratio for row in rows if row.torch_tokens_per_s is not None]
    against_torch = statistics.median(same), min(same)
    best = max((row for row in rows if row.has_measured_split), key=lambda row: row.ratio)
    print("\nover torch: {:.3f} in the median, {:.3f} at least; {} wanted".format(*against_torch, TORCH_BUDGET))
    print(f"over data parallel: {best.ratio:.3f} with {best.name}; {DATA_PARALLEL_BUDGET} wanted")
    return min(same) >= TORCH_BUDGET and best.ratio >= DATA_PARALLEL_BUDGET


def show_shards(rows: Sequence[ShardRow]) -> int:
    table = Table({"": 34, "tokens/s": 13, **{f"over {name}": 31 for name in THEIRS}, "MiB, rank by rank": 24})
    for row in rows:
        ours = with_spread(f"{row.tokens_per_s:.0f}", row.spread)
        peaks = " ".join(f"{each / 2**20:.1f}" for each in row.peak_bytes)
        table.print([row.name, ours, *(f"{ratio:.3f}" for ratio in row.ratios.values()), peaks])
    of_one = {row.name: (row.ratios[FSDP2], max(row.peak_bytes)) for row in rows}
    _, torch_bytes = of_one[FSDP2]
    print(f"\nover {FSDP2}: {SHARD_RATE} and {SHARD_BYTES} of the bytes wanted")
    kept = [name for name in OURS if of_one[name][0] >= SHARD_RATE and of_one[name][1] <= SHARD_BYTES * torch_bytes]
    for name in OURS:
        print(f"{name}: {of_one[name][0]:.3f} of the tokens/s, {of_one[name][1] / torch_bytes:.3f} of the bytes")
    return int(not kept)


def main() -> int:
    """Print the table; return 1 when a budget is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--shards", action="store_true", help="train with shards, against torch's FSDP2")
    parser.add_argument("--families", type=comma_separated, default=list(COUNTERPARTS))
    parser.add_argument("--candidates", type=comma_separated, default=list(CANDIDATES))
    arguments = parser.parse_args()
    if arguments.rows:
        become_rank()
        if arguments.shards:
            give_rows(arguments.rows, map(asdict, measure_shards(DECODER, BATCH, LENGTH, arguments.rounds)))
            return 0
        give_rows(arguments.rows, measure(arguments.families, arguments.candidates, arguments.rounds))
        return 0
    os.environ["KINETO_LOG_LEVEL"] = "99"  # torch's profiler says nothing
    if arguments.shards:
        words = ["--shards", "--rounds", str(arguments.rounds)]
        found = [ShardRow(**row) for row in rows_of_ranks(__file__, words, num_ranks=SIZES[0] * SIZES[1])]
        write_rows(arguments.output, [asdict(row) for row in found])
        return show_shards(found)
    print(f"torch {torch.__version__}; {NUM_TOKENS} tokens a step; medians of {arguments.rounds} (and middle half)\n")
    words = ["--families", ",".join(arguments.families), "--candidates", ",".join(arguments.candidates)]
    words += ["--rounds", str(arguments.rounds)]
    rows = [Row(**row) for row in rows_of_ranks(__file__, words, num_ranks=NUM_RANKS)]
    write_rows(arguments.output, [asdict(row) for row in rows])
    return 0 if report(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
