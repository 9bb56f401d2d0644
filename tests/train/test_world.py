"""How many processes fit a run, and where each of them is."""

import pytest
import torch
import torch.distributed as dist

from penstock.errors import ConfigError
from penstock.execute.control.collectives import Control
from penstock.train.setup import check_together
from penstock.train.world import check_ranks, replicas_of, require_same_layout
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.settings.tables import config_with

CPU = torch.device("cpu")


def config_of(ranks=2, data=1, **parallel):
    return config_with(pipeline={"ranks": ranks}, parallel={"data": data} | parallel, batch={"size": 48})


@pytest.mark.parametrize(
    ("config", "num_processes", "told"),
    [
        (config_of(), 1, "for 2 ranks, but 1 process runs. Start 2 with torchrun .*, or pass --set pipeline.ranks=1"),
        (config_of(), 6, "but 6 processes run. .* or pass --set pipeline.ranks=6 or parallel.data=3"),
        (
            config_of(data=3),
            4,
            r"for 6 ranks \(pipeline.ranks = 2 in each of parallel.data = 3 replicas\), but .* --set parallel.data=2",
        ),
        (config_of(data=3), 5, "Start 6 .*, or a multiple of 2 with another parallel.data"),
    ],
)
def test_a_world_of_another_size_is_refused_with_those_that_fit(config, num_processes, told):
    with pytest.raises(ConfigError, match=f"^pipeline.ranks: .*{told}$"):
        check_ranks(config, num_processes)

    check_ranks(config, config.num_processes)


def test_ranks_that_were_told_otherwise_are_refused_on_all_of_them_before_the_plan_is_looked_at():
    def errors(check, *configs):
        return on_ranks(2, lambda transport: error_of(check, configs[transport.rank], transport))

    def check_layout(config, transport):
        require_same_layout(config, Control(transport))

    other = config_of(2, 1), config_of(1, 2)
    told = "pipeline.ranks: 1 on rank 1, but 2 on rank 0; give all ranks the same file"
    assert [str(error) for error in errors(check_layout, *other)] == [told] * 2
    assert {error.key for error in errors(check_together, *other)} == {"pipeline.ranks"}
    shards = config_of(1, 2), config_of(1, 2, shard="full")
    assert {error.key for error in errors(check_layout, *shards)} == {"parallel.shard"}


def mesh_of_rank(rank, config):
    mesh = replicas_of(config, CPU)["mesh"]
    ranks = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    return ranks["pipeline"], ranks["data"]


def test_the_replicas_of_a_stage_are_neighbours(four_ranks):
    assert four_ranks.run(mesh_of_rank, config_of(2, 2)) == [
        ([0, 2], [0, 1]),
        ([1, 3], [0, 1]),
        ([0, 2], [2, 3]),
        ([1, 3], [2, 3]),
    ]


def test_shards_are_told_where_there_are_several_replicas(monkeypatch):
    monkeypatch.setattr("penstock.train.world.init_device_mesh", lambda *sizes, mesh_dim_names: (sizes, mesh_dim_names))

    found = replicas_of(config_of(2, 3, shard="full", residency=0, look_ahead=4, gradients="mean"), CPU)

    mesh = (("cpu", (2, 3)), ("pipeline", "data"))
    sharding = {"shard": "full", "residency": None, "look_ahead": 4}
    assert found == {"mesh": mesh, "replica_gradients": "mean"} | sharding
    assert replicas_of(config_of(2, 3), CPU)["shard"] == "none"
    assert replicas_of(config_of(2, 1, shard="full"), CPU) == {}
