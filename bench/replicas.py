"""Measure replicas on a mesh: what reductions, gathers and shards cost, against DDP, `fully_shard` and the simulator.

    python bench/replicas.py [--parts ddp,host,emulated,simulated,memory] [--rounds N] [--output FILE.json]

ddp        a step of replicas with `shard="none"` against DistributedDataParallel around each layer, on 2 and 4 ranks,
           each a replica of its own; the median ratio is at most 1.0
host       what shards add to a step of tiny layers on 2 x 2 ranks, over a pipeline without replicas, against what
           `fully_shard` of the module of each stage adds to torch's 1F1B: at most half of it
emulated   stages that sleep, with emulated exchanges beside them: a step takes at most 1.03 times the simulated one
simulated  the best setting of `residency` and `look_ahead` against torch's placement, which keeps 3 stages whole: at
           no more memory faster, or at no more time with less memory
memory     AdamW in float32, 4 replicas, 8 stages a rank, 2 of them whole: weights, gradients, optimizer state and
           buffers of collectives, as torch's allocator counts them, are at most half of those with `shard="none"`;
           and `memory_report` predicts to 5 % what it counts where gradients add up to those of a step before; where
           they were zeroed, shards of them come only with their reductions, which the model of memory does not know

What is compared runs in turns. Exit status 1 where a budget is missed.
"""

import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from allocations import allocations_of
from emulated_replicas import SETTINGS, measured
from in_torch import torch_step
from on_ranks import (
    Table,
    become_rank,
    bench_parser,
    comma_separated,
    give_rows,
    in_turn,
    paired_ratio,
    rows_of_ranks,
    write_rows,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch_gathers import simulated

from penstock import Pipeline
from penstock.schedules import build

DDP_CASES = [(64, 4), (512, 4), (1024, 2)]
"""Width of the layers, and microbatches of a replica."""
DDP_LAYERS, DDP_ROWS = 4, 2
TINY_WIDTH, TINY_ROWS, TINY_MICROBATCHES, TINY_LAYERS = 64, 4, 8, 4
"""Layers of a stage."""
WIDE, WIDE_STAGES = 512, 8
MARK = "the step that counts"
DDP_BUDGET, HOST_BUDGET, EMULATED_BUDGET, MEMORY_BUDGET, PREDICTION_BUDGET = 1.0, 0.5, 1.03, 0.5, 0.05
NUM_EMULATED_STEPS = 5

Rows = Sequence[dict[str, Any]]


def own_batch(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this replica, the same on each of its ranks."""
    return torch.randn(rows, width), torch.randn(rows, width)


# ---- against DistributedDataParallel


def with_ddp(num_rounds: int) -> Iterator[dict[str, Any]]:
    """Measure all cases on this rank, which is a replica."""
    for width, microbatches in DDP_CASES:
        torch.manual_seed(dist.get_rank())
        inputs, target = own_batch(microbatches * DDP_ROWS, width)
        with ExitStack() as stack:
            pipelines = {kind: stack.enter_context(replica(kind, width, microbatches)) for kind in ("mesh", "ddp")}
            turns = {kind: partial(step_from_none, each, inputs, target) for kind, each in pipelines.items()}
            seconds = in_turn(turns, num_rounds)
        yield {
            "ranks": dist.get_world_size(),
            "width": width,
            "microbatches": microbatches,
            "seconds": seconds,
            "ratio": paired_ratio(seconds["mesh"], seconds["ddp"]),
        }


def step_from_none(pipeline: Pipeline, inputs: Tensor, target: Tensor) -> None:
    """Run a step as training does: without gradients of the one before."""
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(inputs, target=target)


def replica(kind: str, width: int, microbatches: int) -> Pipeline:
    """Make the pipeline of this replica."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(DDP_LAYERS)]
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
        return Pipeline(layers, "1f1b", microbatches, mse_loss, mesh=mesh)
    wrapped = [DistributedDataParallel(layer, process_group=dist.group.WORLD) for layer in layers]
    return Pipeline(wrapped, "1f1b", microbatches, mse_loss, ranks=1)


def show_ddp(rows: Rows) -> bool:
    table = Table({"ranks": 5, "width": 6, "microbatches": 12, "mesh, ms": 9, "DDP, ms": 9, "ratio": 6})
    for row in rows:
        middles = [ms(times) for times in row["seconds"].values()]
        table.print([*(str(row[key]) for key in ("ranks", "width", "microbatches")), *middles, f"{row['ratio']:.2f}"])
    return all(row["ratio"] <= DDP_BUDGET for row in rows)


# ---- the host's time, against fully_shard


def on_host(num_rounds: int) -> Iterator[dict[str, Any]]:
    """Measure steps of layers that take next to no time, with and without shards, in Penstock and in torch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    schedule = build("1f1b", ranks=2, microbatches=TINY_MICROBATCHES)
    torch.manual_seed(mesh.get_local_rank("data"))
    inputs, target = own_batch(TINY_MICROBATCHES * TINY_ROWS, TINY_WIDTH)
    parts = [range(first, first + TINY_LAYERS) for first in (0, TINY_LAYERS)]
    wraps = {"torch": nn.Module.requires_grad_, "fully_shard": partial(fully_shard, mesh=mesh["data"])}
    in_torch = {
        name: torch_step("1f1b", schedule, tiny_layers(), parts, mse_loss, mesh=mesh, wrap=wrap)
        for name, wrap in wraps.items()
    }
    options: dict[str, dict[str, Any]] = {"alone": {"process_group": mesh.get_group("pipeline")}}
    options |= {shard: {"mesh": mesh, "shard": shard} for shard in ("none", "optimizer", "full")}
    with ExitStack() as stack:
        turns = {
            name: partial(
                stack.enter_context(Pipeline(tiny_layers(), schedule, loss=mse_loss, **own)).step, inputs, target=target
            )
            for name, own in options.items()
        } | {name: partial(step, inputs, target) for name, step in in_torch.items()}
        seconds = in_turn(turns, num_rounds)
    added = {name: added_s(seconds[name], seconds["alone"]) for name in ("none", "optimizer", "full")}
    theirs_s = added_s(seconds["fully_shard"], seconds["torch"])
    for name, own_s in added.items():
        yield {
            "shard": name,
            "added_s": own_s,
            "fully_shard_s": theirs_s,
            "ratio": own_s / theirs_s,
            "seconds": seconds,
        }


def tiny_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(2 * TINY_LAYERS)]


def added_s(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds of what one takes longer."""
    return statistics.median(first - second for first, second in zip(above, below, strict=True))


def show_host(rows: Rows) -> bool:
    print("".join(f"{name}: {ms(times)} ms; " for name, times in rows[0]["seconds"].items()))
    table = Table({"shard": 9, "adds, ms": 9, "fully_shard adds": 16, "ratio": 6})
    for row in rows:
        table.print(
            [row["shard"], *(f"{1e3 * row[key]:.2f}" for key in ("added_s", "fully_shard_s")), f"{row['ratio']:.2f}"]
        )
    return all(row["ratio"] <= HOST_BUDGET for row in rows if row["shard"] != "none")


# ---- emulated and simulated


def show_emulated(rows: Rows) -> bool:
    table = Table(
        {"residency": 9, "look-ahead": 10, "measured, ms": 12, "simulated, ms": 13, "ratio": 6, "fitted gathers": 14}
    )
    for row in rows:
        middles = [ms(row["seconds"]), f"{1e3 * row['simulated_s']:.2f}"]
        ratios = [f"{row[key]:.3f}" for key in ("ratio", "gather_fitted_over_given")]
        table.print([str(row["residency"] or "all"), str(row["look_ahead"]), *middles, *ratios])
    return all(row["ratio"] <= EMULATED_BUDGET for row in rows)


def show_simulated(rows: Rows) -> bool:
    """Say whether each family but zbv, whose ranks have 2 stages, beats torch; those are to be no worse."""
    table = Table({"family": 16, "gather / F": 10, "time, no more memory": 20, "memory, no more time": 20})
    for row in rows:
        shares = [f"{row[key]:.3f}" for key in ("seconds_at_no_more_bytes", "bytes_at_no_more_seconds")]
        table.print([row["family"], str(row["gather"]), *shares])
    best = [min(row["seconds_at_no_more_bytes"], row["bytes_at_no_more_seconds"]) for row in rows]
    return all(share < 1 or (row["family"] == "zbv" and share <= 1) for share, row in zip(best, rows, strict=True))


# ---- memory


def held() -> Iterator[dict[str, Any]]:
    """Count what each way to shard holds, from before the pipeline is made."""
    for shard in ("none", "optimizer", "full"):
        torch.manual_seed(dist.get_rank())
        inputs, target = own_batch(2, WIDE)
        predicted: list[float] = []
        found = allocations_of(partial(train_wide, shard, inputs, target, predicted))
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, found.peak_bytes_in(MARK))
        weight_bytes = WIDE_STAGES * 4 * (WIDE + 1) * WIDE
        yield {"shard": shard, "peak_bytes": peaks, "weight_bytes": weight_bytes, "predicted": predicted}


def train_wide(shard: str, inputs: Tensor, target: Tensor, predicted: list[float]) -> None:
    """Run some steps of stages whose activations are next to nothing; the one that is marked counts.

    `predicted` gets the predicted peaks over what `memory_report` counts: behind `zero_grad`, and without.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    layers: list[Callable[[], nn.Module]] = [partial(nn.Linear, WIDE, WIDE) for _ in range(WIDE_STAGES)]
    schedule = build("looped-bfs", ranks=1, microbatches=len(inputs), stages_per_rank=WIDE_STAGES)
    with closing(Pipeline(layers, schedule, loss=mse_loss, mesh=mesh, shard=shard)) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
        for is_last in (False, False, True):
            with record_function(MARK if is_last else "a step before"):
                pipeline.step(inputs, target=target)
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(2):
            report = pipeline.memory_report(inputs, target=target, optimizer=optimizer)
            (rank,), (peak,) = report.ranks, report.predicted_bytes
            predicted.append(peak / (rank.counted_bytes + (rank.optimizer_bytes or 0)))


def show_memory(rows: Rows) -> bool:
    table = Table({"shard": 9, "peak, MiB": 9, "over weights": 12, "predicted / counted": 19, "zeroed": 6})
    for row in rows:
        peak = max(row["peak_bytes"])
        zeroed, adding = row["predicted"]
        own = f"{peak / 2**20:.1f}", f"{peak / row['weight_bytes']:.2f}", f"{adding:.3f}", f"{zeroed:.3f}"
        table.print([row["shard"], *own])
    none, _, full = (max(row["peak_bytes"]) for row in rows)
    print(f"full over none: {full / none:.2f}; {MEMORY_BUDGET} wanted")
    is_predicted = all(abs(row["predicted"][1] - 1) <= PREDICTION_BUDGET for row in rows)
    return full <= MEMORY_BUDGET * none and is_predicted


# ---- the command


def ms(times: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(times):.2f}"


PARTS: dict[str, tuple[tuple[int, ...], Callable[[Namespace], Iterator[dict[str, Any]]], Callable[[Rows], bool]]] = {
    "ddp": ((2, 4), lambda arguments: with_ddp(arguments.rounds), show_ddp),
    "host": ((4,), lambda arguments: on_host(arguments.rounds), show_host),
    "emulated": ((4,), lambda arguments: measured(min(arguments.rounds, NUM_EMULATED_STEPS), SETTINGS), show_emulated),
    "simulated": ((), lambda arguments: simulated(), show_simulated),
    "memory": ((4,), lambda arguments: held(), show_memory),
}
"""By name: numbers of ranks, what runs on them (or here), and what shows it and says whether its budget is kept."""


def main() -> int:
    """Print the tables; return 1 where a budget is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--parts", type=comma_separated, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    if arguments.rows:
        (part,) = arguments.parts
        become_rank(measures_time=part != "memory")
        give_rows(arguments.rows, PARTS[part][1](arguments))
        return 0
    os.environ["KINETO_LOG_LEVEL"] = "99"  # torch's profiler says nothing
    found: list[dict[str, Any]] = []
    missed = []
    for part in arguments.parts:
        counts, work, show = PARTS[part]
        words = ["--parts", part, "--rounds", str(arguments.rounds)]
        rows = [row for count in counts for row in rows_of_ranks(__file__, words, num_ranks=count)] or [
            *work(arguments)
        ]
        print(f"\n{part} (load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
        if not show(rows):
            missed.append(part)
        found += [{"part": part, **row} for row in rows]
    write_rows(arguments.output, found)
    print(f"\nmissed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
