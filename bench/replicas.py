"""Measure a step of replicas on a mesh against the same step with DistributedDataParallel around each layer.

    python bench/replicas.py [--ranks N] [--rounds N] [--output FILE.json]      some 20 seconds

Each rank is a replica of its own, so that nothing but the reduction differs: on the mesh one exchange per stage, in the
order of the replicas; with DDP one all-reduce of gloo per parameter. Both run in turns. Exit status 1 where the mesh is
slower.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import Table, become_rank, bench_parser, give_rows, in_turn, paired_ratio, rows_of_ranks, write_rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline

CASES = [(64, 4), (512, 4), (1024, 2)]
"""Width of the layers, and microbatches of a replica."""
NUM_LAYERS = 4
ROWS = 2
"""Of a microbatch."""


def make(kind: str, width: int, microbatches: int) -> Pipeline:
    """Make the pipeline of this replica."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(NUM_LAYERS)]
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
        return Pipeline(layers, "1f1b", microbatches, nn.functional.mse_loss, mesh=mesh)
    wrapped = [DistributedDataParallel(layer, process_group=dist.group.WORLD) for layer in layers]
    return Pipeline(wrapped, "1f1b", microbatches, nn.functional.mse_loss, ranks=1)


def measured(arguments: Namespace) -> Iterator[dict[str, Any]]:
    """Measure all cases on this rank."""
    for width, microbatches in CASES:
        with ExitStack() as stack:
            pipelines = {kind: stack.enter_context(make(kind, width, microbatches)) for kind in ("mesh", "ddp")}
            inputs, target = torch.randn(microbatches * ROWS, width) + dist.get_rank(), torch.randn(1, width)
            target = target.expand(len(inputs), -1)
            turns = {kind: partial(each.step, inputs, target=target) for kind, each in pipelines.items()}
            seconds = in_turn(turns, arguments.rounds)
        ratio = paired_ratio(seconds["mesh"], seconds["ddp"])
        yield {"width": width, "microbatches": microbatches, "seconds": seconds, "ratio": ratio}


def main() -> int:
    """Print the table; return 1 where the mesh is slower."""
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="replicas (default: 2)")
    arguments = parser.parse_args()
    if arguments.rows:
        become_rank()
        give_rows(arguments.rows, measured(arguments))
        return 0
    words = ["--ranks", str(arguments.ranks), "--rounds", str(arguments.rounds)]
    rows = rows_of_ranks(__file__, words, num_ranks=arguments.ranks)
    table = Table({"width": 6, "microbatches": 12, "mesh, ms": 9, "DDP, ms": 9, "ratio": 6})
    for row in rows:
        middles = [f"{1e3 * sorted(times)[len(times) // 2]:.2f}" for times in row["seconds"].values()]
        table.print([str(row["width"]), str(row["microbatches"]), *middles, f"{row['ratio']:.2f}"])
    write_rows(arguments.output, rows)
    return int(any(row["ratio"] > 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
