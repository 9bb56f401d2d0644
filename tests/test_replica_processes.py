"""Replicas whose ranks are processes: the same numbers, one error on all ranks, and no wait behind a wrong mesh."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock as ps
from tests.local_pipelines import WIDTH, error_of, float_layers, settle, square_loss
from tests.mesh_pipelines import FLOAT, MICROBATCHES, Job, device_mesh, difference, pipeline_of, train, train_alone
from tests.ranks import RankPool, run_ranks, run_ranks_with_deaths
from tests.sharded_pipelines import NONE, ONE, OPTIMIZER, TWO, name_of

DEADLINE_S = 20.0
LONGEST_NOTICE_S = 3.0


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool


def trained(rank, pipeline, data, names, schedule):
    mesh = device_mesh(pipeline, data, names)
    return train(mesh, Job([8] * data), schedule, 20, adamw, deadline_s=DEADLINE_S), dist.get_rank()


BOTH = ("data", "pipeline")


@pytest.mark.parametrize(
    ("pipeline", "data", "names", "schedule"),
    [
        (2, 2, BOTH, "1f1b"),
        (2, 2, BOTH, "interleaved-1f1b"),
        (2, 2, ("pipeline", "data"), "zbv"),
        (1, 4, BOTH, "1f1b"),
        (1, 4, ("data",), "1f1b"),
        (4, 1, ("pipeline",), "1f1b"),
    ],
)
def test_four_processes_train_as_one_does(four, pipeline, data, names, schedule):
    found = [own for own, _ in four.run(trained, pipeline, data, names, schedule)]
    if names[0] == "pipeline" and data > 1:  # its ranks count along `data` first
        found = [found[place * data + replica] for replica in range(data) for place in range(pipeline)]

    assert difference(found, train_alone(Job([8] * data), 20, adamw), num_replicas=data) == []


@pytest.mark.parametrize("data", [2, 3])
def test_replicas_of_one_rank_train_as_one_process_does(data):
    found = [own for own, _ in run_ranks(data, trained, 1, data, BOTH, "1f1b")]

    assert difference(found, train_alone(Job([8] * data), 20, adamw), num_replicas=data) == []


# ---- a mesh that is wrong


def attempts(rank, make_mesh, options):
    """What two pipelines raise, in seconds, and whether a right one works afterwards."""
    begin_s = time.monotonic()
    job = Job([8, 8])

    def make():
        with ps.Pipeline(job.make_layers(), "1f1b", MICROBATCHES, square_loss, mesh=make_mesh(), **options(rank)):
            pass

    error = error_of(make)
    took_s = time.monotonic() - begin_s
    with pipeline_of(device_mesh(2, 2), job, "1f1b", deadline_s=DEADLINE_S) as pipeline:
        inputs, target = job.of(pipeline.replica)
        return type(error).__name__, str(error), took_s, pipeline.step(inputs, target=target).loss.item()


def plain_options(rank):
    return {"deadline_s": DEADLINE_S}


def only_on_rank_2(odd, usual):
    return odd if dist.get_rank() == 2 else usual


def unknown():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def misspelt():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dat", "pipeline"))


def reserved():
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "tensor", "pipeline"))


def without_names():
    return init_device_mesh("cpu", (2, 2))


def wrong_on_one():
    return only_on_rank_2(unknown, lambda: device_mesh(2, 2))()


def no_mesh_at_all():
    return only_on_rank_2("data", device_mesh(2, 2))


def another_on_one():
    both = device_mesh(2, 2), device_mesh(4, 1)
    return only_on_rank_2(*both)


def in_another_order():
    both = device_mesh(2, 2), device_mesh(2, 2, ("pipeline", "data"))
    return only_on_rank_2(*both)


def none_on_one():
    return only_on_rank_2(None, device_mesh(2, 2))


@pytest.mark.parametrize(
    ("make_mesh", "words"),
    [
        (unknown, "dimension 'replica' is unknown"),
        (misspelt, "Did you mean 'data'"),
        (reserved, "'tensor' cannot be used yet"),
        (without_names, "have no names"),
        (wrong_on_one, "dimension 'replica' is unknown"),
        (no_mesh_at_all, "expected a DeviceMesh"),
        (another_on_one, "give every rank one mesh"),
        (in_another_order, "give every rank one mesh"),
        (none_on_one, "was given a mesh, rank"),
    ],
)
def test_a_wrong_mesh_is_one_message_on_every_rank_and_costs_no_deadline(four, make_mesh, words):
    found = four.run(attempts, make_mesh, plain_options)

    for kind, text, took_s, loss in found:
        assert kind == "ConfigError"
        assert words in text
        assert took_s < DEADLINE_S / 2
        assert loss == found[0][3]


def with_a_group(rank):
    return {"deadline_s": DEADLINE_S, "process_group": dist.group.WORLD}


def with_a_reduction(rank):
    return {"deadline_s": DEADLINE_S} | ({"reduce_stage": print} if rank == 1 else {})


def with_a_transport(rank):
    from penstock.execute.transport import LocalTransport

    return {"deadline_s": DEADLINE_S, "transport": LocalTransport.create(1)[0]}


def with_other_layers(rank):
    return {"deadline_s": DEADLINE_S, "split": [3, 5] if rank == 3 else [4, 4]}


def with_a_schedule_for_three(rank):
    return {"deadline_s": DEADLINE_S, "ranks": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (with_a_group, "goes without a process group"),
        (with_a_reduction, "goes without reduce_stage"),
        (with_a_transport, "goes without a transport"),
        (with_other_layers, "disagree on split"),
        (with_a_schedule_for_three, "but the pipeline has 2 ranks"),
    ],
)
def test_what_a_mesh_does_not_go_with_is_one_message_on_every_rank(four, options, words):
    found = four.run(attempts, mesh_of_two, options)

    for _, text, took_s, loss in found:
        assert words in text
        assert took_s < DEADLINE_S / 2
        assert loss == found[0][3]


def mesh_of_two():
    return device_mesh(2, 2)


def on_half_of_the_ranks(rank):
    """Two jobs side by side, each of two replicas of one rank, on meshes of two of the four ranks."""
    groups = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("data",))]
    job = Job([8, 8])
    return train(groups[rank // 2], job, "1f1b", 2, adamw, deadline_s=DEADLINE_S)


def test_jobs_beside_each_other_have_meshes_of_their_own_ranks(four):
    found = four.run(on_half_of_the_ranks)

    for own in (found[:2], found[2:]):
        assert difference(own, train_alone(Job([8, 8]), 2, adamw), num_replicas=2) == []


def wrapped_layers(rank, kind):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module
    from torch.nn.parallel import DistributedDataParallel

    mesh = device_mesh(2, 2)
    group = mesh.get_group("data")
    wrap = {
        "DistributedDataParallel": lambda layer: DistributedDataParallel(layer, process_group=group),
        "fully_shard": lambda layer: fully_shard(layer, mesh=mesh["data"]),
        "DTensors": lambda layer: distribute_module(layer, mesh["data"]),
    }[kind]
    layers = [wrap(layer) for layer in float_layers(FLOAT, 4)]
    return str(error_of(ps.Pipeline, layers, "1f1b", MICROBATCHES, square_loss, mesh=mesh, deadline_s=DEADLINE_S))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "DistributedDataParallel",
            "DistributedDataParallel reduces its gradients, which the mesh",
        ),
        ("fully_shard", "fully_shard reduces its gradients, which the mesh"),
        ("DTensors", "its parameters are DTensors"),
    ],
)
def test_layers_that_reduce_by_themselves_or_are_split_are_refused(four, kind, words):
    for text in four.run(wrapped_layers, kind):
        assert words in text


def other_shapes(rank, odd):
    mesh = device_mesh(2, 2)
    layers = float_layers(FLOAT, 4)
    if rank == 3 and odd == "shape":
        layers[2] = settle(nn.Linear(WIDTH, WIDTH, bias=False, dtype=FLOAT), 1)
    if odd == "lazy":
        layers[2] = nn.LazyLinear(WIDTH, dtype=FLOAT)
    return str(error_of(ps.Pipeline, layers, "1f1b", MICROBATCHES, square_loss, mesh=mesh, deadline_s=DEADLINE_S))


@pytest.mark.parametrize(("odd", "words"), [("shape", "stage 1 holds other parameters"), ("lazy", "has no shape")])
def test_replicas_that_hold_other_parameters_are_refused(four, odd, words):
    for text in four.run(other_shapes, odd):
        assert words in text
    if odd == "shape":
        assert "rank 3 (pipeline 1, data 1)" in text


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
    """The first error of some steps, how long before it this rank's step began, and what the next step brings."""
    job, mesh = planted_job(how if rank == bad else "", data), device_mesh(pipeline, data)
    with pipeline_of(mesh, job, "interleaved-1f1b", deadline_s=deadline_s, **setting) as pipeline:
        inputs, target = job.of(pipeline.replica)
        error = loss = None
        for _ in range(3):
            begin_s = time.monotonic()
            for each in pipeline.parameters():
                each.grad = None
            try:
                loss = pipeline.step(inputs, target=target).loss.item()
            except ps.PipelineError as found:
                error = error or (type(found).__name__, str(found), found.rank, time.monotonic() - begin_s)
                if how != "error":
                    return error, None
        return error, loss


@pytest.mark.parametrize(
    ("pipeline", "data", "bad", "setting"),
    [
        (2, 2, 0, NONE),
        (2, 2, 1, NONE),
        (2, 2, 2, NONE),
        (2, 2, 3, NONE),
        (1, 4, 1, NONE),
        (1, 4, 3, NONE),
        (2, 2, 0, TWO),
        (2, 2, 3, ONE),
        (1, 4, 1, OPTIMIZER),
        pytest.param(1, 4, 3, TWO, marks=pytest.mark.full),
    ],
    ids=name_of,
)
def test_a_killed_rank_is_named_by_all_others_at_once(pipeline, data, bad, setting):
    outcome = run_ranks_with_deaths(4, failing, bad, "kill", DEADLINE_S, pipeline, data, setting)

    assert outcome.exit_codes == {bad: -signal.SIGKILL}
    assert len(outcome.results) == 3
    for (kind, text, rank, took_s), _ in outcome.results.values():
        assert kind == "PeerLost"
        assert rank == bad
        assert f"rank {bad} (pipeline {bad % pipeline}, data {bad // pipeline}) is the culprit: its process" in text
        assert took_s < LONGEST_NOTICE_S


@pytest.mark.parametrize(("bad", "setting"), [(0, NONE), (3, NONE), (0, OPTIMIZER), (3, TWO)], ids=name_of)
def test_an_error_on_one_rank_is_one_on_all_and_the_next_step_is_right(four, bad, setting):
    expected = train_alone(planted_job("", 2)).losses[0].item()

    for (_, text, rank, took_s), loss in four.run(failing, bad, "error", DEADLINE_S, 2, 2, setting):
        assert rank == bad
        assert "ValueError: planted" in text
        assert took_s < LONGEST_NOTICE_S
        assert loss == pytest.approx(expected, abs=1e-14)


STOPPED = [ONE, *(pytest.param(setting, marks=pytest.mark.full) for setting in (NONE, OPTIMIZER))]


@pytest.mark.parametrize("setting", STOPPED, ids=name_of)
def test_a_stopped_rank_is_named_by_all_others_at_the_deadline(setting):
    with RankPool(4) as pool:
        pool.begin(failing, 2, "stop", 2.0, 2, 2, setting)
        outcome = pool.collect(timeout_s=15.0)

        assert outcome.late == [2]
        assert len(outcome.results) == 3
        for (_, text, rank, took_s), _ in outcome.results.values():
            assert rank == 2
            assert "rank 2 (pipeline 0, data 1) is the culprit: its process" in text
            assert "is stopped" in text
            assert took_s < 2.0 + 2.0


def on_a_slice_of_a_larger_mesh(rank, setting):
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("job", "pipeline", "data"))
    return train(whole["pipeline", "data"], Job([8, 8]), "1f1b", 2, adamw, deadline_s=DEADLINE_S, **setting)


@pytest.mark.parametrize("setting", [NONE, ONE], ids=name_of)
def test_a_slice_of_a_larger_mesh_is_a_job_of_its_own(four, setting):
    found = four.run(on_a_slice_of_a_larger_mesh, setting)

    for own in (found[:2], found[2:]):
        assert difference(own, train_alone(Job([8, 8]), 2, adamw), num_replicas=2) == []
