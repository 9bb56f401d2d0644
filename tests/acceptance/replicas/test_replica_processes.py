"""Replicas whose ranks are processes: the same numbers, one error on all ranks, and no wait behind a wrong mesh."""

import os
import signal
from functools import partial

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.execute.transport import LocalTransport
from tests.support.local_pipelines import WIDTH, error_of, float_layers, settle, square_loss, zero
from tests.support.mesh_pipelines import (
    FLOAT,
    MICROBATCHES,
    Job,
    device_mesh,
    difference,
    pipeline_of,
    train,
    train_alone,
)
from tests.support.ranks import RankPool, run_ranks, run_ranks_with_deaths
from tests.support.sharded_pipelines import ALL, NONE, ONE, OPTIMIZER, TWO, adamw, name_of, ways

DEADLINE_S = 600.0
"""No test waits for it: what ends has not come to it."""
STEPS = 5


def trained(rank, pipeline, data, names, schedule, setting=NONE, steps=STEPS):
    mesh = device_mesh(pipeline, data, names)
    return train(mesh, Job([8] * data), schedule, steps, adamw, deadline_s=DEADLINE_S, **setting)


def by_replica(found, pipeline, data, names):
    """Ranks of a mesh whose first dimension is `pipeline` count along `data` first."""
    if names[0] == "pipeline" and data > 1:
        return [found[place * data + replica] for replica in range(data) for place in range(pipeline)]
    return found


BOTH = ("data", "pipeline")


LAYOUTS = [
    (2, 2, BOTH, "1f1b", NONE),
    (2, 2, BOTH, "interleaved-1f1b", NONE),
    (2, 2, ("pipeline", "data"), "zbv", NONE),
    (1, 2, BOTH, "1f1b", NONE),
    (1, 3, BOTH, "1f1b", NONE),
    (1, 4, BOTH, "1f1b", NONE),
    (1, 4, ("data",), "1f1b", NONE),
    (4, 1, ("pipeline",), "1f1b", NONE),
    (2, 2, BOTH, "interleaved-1f1b", TWO),
    (2, 2, ("pipeline", "data"), "zbv", ONE),
    (2, 2, BOTH, "1f1b", OPTIMIZER),
    (1, 4, ("data",), "interleaved-1f1b", ALL),
]
EVERY_LAYOUT = [
    (*sizes, BOTH, schedule, setting, 20)
    for sizes in ((2, 2), (1, 4), (4, 1), (1, 2), (1, 3), (2, 4), (4, 2))
    for schedule in ("1f1b", "interleaved-1f1b", "zbv", "zb-h1")
    for setting in (ONE, TWO, ALL, OPTIMIZER, NONE)
]


@ways("pipeline data names schedule setting steps", slow=[(*each, STEPS) for each in LAYOUTS], full=EVERY_LAYOUT)
def test_processes_train_as_one_does(request, pipeline, data, names, schedule, setting, steps):
    num_ranks = pipeline * data
    pool = {2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}.get(num_ranks)
    run = request.getfixturevalue(pool).run if pool else partial(run_ranks, num_ranks)
    found = by_replica(run(trained, pipeline, data, names, schedule, setting, steps), pipeline, data, names)

    assert difference(found, train_alone(Job([8] * data), steps, adamw), num_replicas=data) == []


# ---- what is refused


def attempts(rank, case, setting):
    """What a pipeline of a case raises, and the loss of a right one afterwards."""

    def make():
        layers, mesh, options = CASES[case][0](rank)
        options = {"deadline_s": DEADLINE_S, "mesh": mesh} | setting | options
        with ps.Pipeline(layers, "1f1b", MICROBATCHES, square_loss, **options):
            pass

    error = error_of(make)
    job, right = Job([8, 8]), NONE if setting == NONE else ONE
    with pipeline_of(mesh_of_two(), job, "interleaved-1f1b", deadline_s=DEADLINE_S, **right) as pipeline:
        inputs, target = job.of(pipeline.replica)
        return type(error).__name__, str(error), pipeline.step(inputs, target=target).loss.item()


def mesh_of_two():
    return device_mesh(2, 2)


def mesh_of(*sizes, names):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def plain(mesh=lambda rank: mesh_of_two(), options=lambda rank: {}):
    """A case with usual layers, and a mesh or options of its own."""
    return lambda rank: (float_layers(FLOAT, 8), mesh(rank), options(rank))


def only_on_rank_2(odd):
    """A case in which rank 2 has another mesh, or none."""
    return plain(lambda rank: (mesh_of_two(), odd())[rank == 2])


def wrapped(wrap):
    return lambda rank: ([wrap(layer) for layer in float_layers(FLOAT, 4)], mesh_of_two(), {})


def other_layer(make, bad=None):
    """A case in which a layer of some ranks is another one."""
    return lambda rank: (
        [make() if index == 2 and bad in (None, rank) else each for index, each in enumerate(float_layers(FLOAT, 4))],
        mesh_of_two(),
        {},
    )


WRAPPED = {
    "DistributedDataParallel": wrapped(
        lambda layer: DistributedDataParallel(layer, process_group=mesh_of_two().get_group("data"))
    ),
    "fully_shard": wrapped(lambda layer: fully_shard(layer, mesh=mesh_of_two()["data"])),
    "DTensors": wrapped(lambda layer: distribute_module(layer, mesh_of_two()["data"])),
}
MESHES = {
    "misspelt": (plain(lambda rank: mesh_of(2, 2, names=("dat", "pipeline"))), "Did you mean 'data'"),
    "reserved": (
        plain(lambda rank: mesh_of(2, 1, 2, names=("data", "tensor", "pipeline"))),
        "'tensor' cannot be used yet",
    ),
    "no names": (plain(lambda rank: mesh_of(2, 2, names=None)), "have no names"),
    "wrong on one": (
        plain(lambda rank: mesh_of(2, 2, names=("replica" if rank == 2 else "data", "pipeline"))),
        "dimension 'replica' is unknown",
    ),
    "another": (only_on_rank_2(lambda: device_mesh(4, 1)), "give every rank one mesh"),
    "none": (only_on_rank_2(lambda: None), "was given a mesh, rank"),
    "none for full": (plain(lambda rank: None, lambda rank: TWO), "shard: 'full' needs the ranks to share with: pass"),
}
OTHERS = {
    "group": (plain(options=lambda rank: {"process_group": dist.group.WORLD}), "goes without a process group"),
    "reduction": (
        plain(options=lambda rank: {"reduce_stage": print} if rank == 1 else {}),
        "goes without reduce_stage",
    ),
    "transport": (plain(options=lambda rank: {"transport": LocalTransport.create(1)[0]}), "goes without a transport"),
    "split": (plain(options=lambda rank: {"split": [3, 5] if rank == 3 else [4, 4]}), "disagree on split"),
    "DistributedDataParallel": (
        WRAPPED["DistributedDataParallel"],
        "DistributedDataParallel reduces its gradients, which the mesh",
    ),
    "fully_shard": (WRAPPED["fully_shard"], "fully_shard reduces its gradients, which the mesh"),
    "DTensors": (WRAPPED["DTensors"], "its parameters are DTensors"),
    "another shape": (
        other_layer(lambda: settle(nn.Linear(WIDTH, WIDTH, bias=False, dtype=FLOAT), 1), bad=3),
        "stage 1 holds other parameters",
    ),
    "lazy": (other_layer(lambda: nn.LazyLinear(WIDTH, dtype=FLOAT)), "has no shape"),
}
OF_SHARDS = {
    **{f"{name} and shards": (case, name) for name, case in WRAPPED.items()},
    "no data dimension": (plain(lambda rank: mesh_of(4, names=("pipeline",))), "'data'"),
    "another shard": (plain(options=lambda rank: {"shard": "optimizer"} if rank == 3 else {}), "disagree on shard"),
    "reduce_stage and shards": (plain(options=lambda rank: {"reduce_stage": print}), "reduce_stage"),
}
CASES = MESHES | OTHERS | OF_SHARDS
QUICK = {
    "misspelt",
    "wrong on one",
    "another",
    "none",
    "none for full",
    "group",
    "split",
    "fully_shard",
    "another shape",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_wrong_mesh_or_what_it_does_not_go_with_is_one_message_on_every_rank_and_costs_no_deadline(four_ranks, case):
    kinds = ("ConfigError",) if case in MESHES else ("ConfigError", "PipelineError")

    found = four_ranks.run(attempts, case, TWO if case in OF_SHARDS else NONE)

    for kind, text, loss in found:
        assert kind in kinds
        assert CASES[case][1] in text
        assert case != "another shape" or "rank 3 (pipeline 1, data 1)" in text
        assert loss == found[0][2]


# ---- meshes of some ranks


def on_half_of_the_ranks(rank):
    """Two jobs side by side, each of two replicas of one rank, on meshes of two of the four ranks."""
    groups = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("data",))]
    job = Job([8, 8])
    return train(groups[rank // 2], job, "1f1b", 2, adamw, deadline_s=DEADLINE_S)


def test_jobs_beside_each_other_have_meshes_of_their_own_ranks(four_ranks):
    found = four_ranks.run(on_half_of_the_ranks)

    for own in (found[:2], found[2:]):
        assert difference(own, train_alone(Job([8, 8]), 2, adamw), num_replicas=2) == []


# ---- failures


class Planted(nn.Module):
    """Ends or stops its process, or fails, in some forward of the layers that share the list of forwards."""

    def __init__(self, how, forwards):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 3)
        self.how = how
        self.forwards = forwards

    def forward(self, x):
        self.forwards.append(self)
        if self.how == "error" and len(self.forwards) == 6:
            raise ValueError("planted")
        if self.how == "kill" and len(self.forwards) == 26:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop" and len(self.forwards) == 26:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.linear(x)


def planted_job(how, data):
    forwards = []
    return Job([8] * data, lambda: [Planted(how, forwards) for _ in range(8)])


def failing(rank, bad, how, deadline_s, pipeline=2, data=2, setting=NONE):
    """The first error of some steps, and what the next step brings."""
    job, mesh = planted_job(how if rank == bad else "", data), device_mesh(pipeline, data)
    with pipeline_of(mesh, job, "interleaved-1f1b", deadline_s=deadline_s, **setting) as pipeline:
        inputs, target = job.of(pipeline.replica)
        error = loss = None
        for _ in range(3):
            zero(pipeline)
            try:
                loss = pipeline.step(inputs, target=target).loss.item()
            except ps.PipelineError as found:
                error = error or (type(found).__name__, str(found), found.rank)
                if how != "error":
                    return error, None
        return error, loss


@pytest.mark.feature("X48")
@ways(
    "pipeline data bad setting",
    (2, 2, 1, NONE),
    slow=[(1, 4, 3, NONE), (2, 2, 0, TWO), (2, 2, 3, ONE), (1, 4, 1, OPTIMIZER)],
)
def test_a_killed_rank_is_named_by_all_others_at_once(pipeline, data, bad, setting):
    outcome = run_ranks_with_deaths(4, failing, bad, "kill", DEADLINE_S, pipeline, data, setting)

    assert outcome.exit_codes == {bad: -signal.SIGKILL}
    assert len(outcome.results) == 3
    for (kind, text, rank), _ in outcome.results.values():
        assert kind == "PeerLost"
        assert rank == bad
        assert f"rank {bad} (pipeline {bad % pipeline}, data {bad // pipeline}) is the culprit: its process" in text


@ways("bad setting", (3, TWO), slow=[(0, NONE), (0, OPTIMIZER)])
def test_an_error_on_one_rank_is_one_on_all_and_the_next_step_is_right(four_ranks, bad, setting):
    expected = train_alone(planted_job("", 2)).losses[0].item()

    for (_, text, rank), loss in four_ranks.run(failing, bad, "error", DEADLINE_S, 2, 2, setting):
        assert rank == bad
        assert "ValueError: planted" in text
        assert loss == pytest.approx(expected, abs=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [ONE, pytest.param(OPTIMIZER, marks=pytest.mark.full)], ids=name_of)
def test_a_stopped_rank_is_named_by_all_others_at_the_deadline(setting):
    with RankPool(4) as pool:
        pool.begin(failing, 2, "stop", 4.0, 2, 2, setting)
        outcome = pool.collect(timeout_s=20.0)

        assert outcome.late == [2]
        assert len(outcome.results) == 3
        for (_, text, rank), _ in outcome.results.values():
            assert rank == 2
            assert "rank 2 (pipeline 0, data 1) is the culprit: its process" in text
            assert "is stopped" in text


def on_a_slice_of_a_larger_mesh(rank, setting):
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("job", "pipeline", "data"))
    return train(whole["pipeline", "data"], Job([8, 8]), "1f1b", 2, adamw, deadline_s=DEADLINE_S, **setting)


@ways("setting", (ONE,), slow=[(NONE,)])
def test_a_slice_of_a_larger_mesh_is_a_job_of_its_own(four_ranks, setting):
    found = four_ranks.run(on_a_slice_of_a_larger_mesh, setting)

    for own in (found[:2], found[2:]):
        assert difference(own, train_alone(Job([8, 8]), 2, adamw), num_replicas=2) == []
