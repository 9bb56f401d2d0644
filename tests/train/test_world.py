"""How many processes fit a run, and where each of them is."""

import pytest
import torch
import torch.distributed as dist

from penstock.errors import ConfigError
from penstock.execute.control.collectives import Control
from penstock.train.settings.config import config_from_table
from penstock.train.setup import check_together
from penstock.train.world import check_ranks, replicas_of, require_same_layout
from tests.support.local_pipelines import error_of, on_ranks

CPU = torch.device("cpu")


def config_of(ranks=2, data=1, **parallel):
    table = {"run": {"folder": "run"}, "data": {"files": ["text"]}, "pipeline": {"ranks": ranks}}
    return config_from_table(table | {"parallel": {"data": data} | parallel, "batch": {"size": 48}})


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


def layout_error(transport, configs):
    return error_of(require_same_layout, configs[transport.rank], Control(transport))


def test_ranks_that_were_told_otherwise_are_refused_on_all_of_them():
    errors = on_ranks(2, layout_error, [config_of(2, 1), config_of(1, 2)])

    assert [str(error) for error in errors] == [
        "pipeline.ranks: 1 on rank 1, but 2 on rank 0; give all ranks the same file"
    ] * 2
    errors = on_ranks(2, layout_error, [config_of(1, 2), config_of(1, 2, shard="full")])
    assert {error.key for error in errors} == {"parallel.shard"}


def test_a_wrong_layout_of_one_rank_is_refused_before_the_plan_is_looked_at():
    def case(transport):
        return error_of(check_together, [config_of(2, 1), config_of(1, 2)][transport.rank], transport)

    assert {error.key for error in on_ranks(2, case)} == {"pipeline.ranks"}


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


def test_one_replica_shares_out_nothing():
    assert replicas_of(config_of(2, 1, shard="full"), CPU) == {}


def test_shards_are_told_where_there_are_several_replicas(monkeypatch):
    monkeypatch.setattr("penstock.train.world.init_device_mesh", lambda *sizes, mesh_dim_names: (sizes, mesh_dim_names))

    found = replicas_of(config_of(2, 3, shard="full", residency=0, look_ahead=4), CPU)

    mesh = (("cpu", (2, 3)), ("pipeline", "data"))
    assert found == {"mesh": mesh, "shard": "full", "residency": None, "look_ahead": 4}
    assert replicas_of(config_of(2, 3), CPU)["shard"] == "none"
