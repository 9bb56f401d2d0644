"""The processes of a run: how many fit, and their places in a pipeline and among its replicas.

    pipeline.ranks = 2, parallel.data = 2      pipeline 0       pipeline 1
                                 data 0        process 0        process 2
                                 data 1        process 1        process 3

`data` varies fastest in the numbers of processes, so that the replicas of a stage are neighbours.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from penstock.errors import ConfigError, count_of
from penstock.execute.control.collectives import Control
from penstock.execute.transport.places import DATA, PIPELINE
from penstock.train.settings.config import RunConfig


def check_ranks(config: RunConfig, num_processes: int) -> None:
    """Refuse a world of another size than the configuration's. Raises: ConfigError, naming the sizes that fit."""
    num_expected, ranks, data = config.num_processes, config.pipeline.ranks, config.parallel.data
    if num_processes == num_expected:
        return
    runs = "1 process runs" if num_processes == 1 else f"{num_processes} processes run"
    replica_note = f" (pipeline.ranks = {ranks} in each of parallel.data = {data} replicas)" if data > 1 else ""
    fits = [f"pipeline.ranks={num_processes}"] if data == 1 else []
    if num_processes % ranks == 0:
        fits.append(f"parallel.data={num_processes // ranks}")
    fix = f"pass --set {' or '.join(fits)}" if fits else f"a multiple of {ranks} with another parallel.data"
    raise ConfigError(
        f"the run is for {count_of(num_expected, 'rank')}{replica_note}, but {runs}. Start {num_expected} with "
        f"torchrun --nproc-per-node, or {fix}",
        key="pipeline.ranks",
    )


def require_same_layout(config: RunConfig, control: Control) -> None:
    """Refuse a rank with another layout than rank 0's in its settings; every rank calls it. Raises: ConfigError."""
    local_layout = {"pipeline.ranks": config.pipeline.ranks}
    local_layout |= {f"parallel.{key}": value for key, value in config.parallel}
    layouts: list[Any] = control.all_gather_object(local_layout)
    for rank, layout in enumerate(layouts):
        for key, value in layout.items():
            first = layouts[0][key]
            if value != first:
                raise ConfigError(
                    f"{value!r} on rank {rank}, but {first!r} on rank 0; give all ranks the same file", key=key
                )


def replicas_of(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments by which a `Pipeline` learns of its replicas, none for one replica; every rank calls it."""
    parallel = config.parallel
    if parallel.data == 1:
        return {}
    sizes = (config.pipeline.ranks, parallel.data)
    sharding = parallel.sharding
    return {
        "mesh": init_device_mesh(device.type, sizes, mesh_dim_names=(PIPELINE, DATA)),
        "shard": sharding.shard,
        "residency": sharding.residency,
        "look_ahead": sharding.look_ahead,
        "replica_gradients": parallel.gradients,
    }
