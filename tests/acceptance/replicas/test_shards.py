"""Replicas and shards train as one process does, in every layout and setting, whatever their parameters are like."""

import gc
import threading
from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from penstock.execute.lost_device import living_instances
from penstock.ir.operations import Op
from tests.acceptance.replicas.test_replicas import Counting
from tests.support.local_pipelines import MAX_WAIT_S, WIDTH, block, settle, values
from tests.support.mesh_pipelines import FLOAT, Job, layers_of, on_mesh, on_pipelines, pipeline_of
from tests.support.sharded_pipelines import (
    ALL,
    FULL,
    NONE,
    ONE,
    OPTIMIZER,
    SCHEDULES,
    SHARDED,
    TWO,
    compared,
    ways,
    whole_gradients,
    wide_job,
)

# ---- layouts


DRAWN = [
    (1, 2, "1f1b", NONE, 20),
    (2, 2, "interleaved-1f1b", NONE, 20),
    (2, 2, "zbv", NONE, 20),
    (1, 3, "zbv", NONE, 20),
    (4, 1, "interleaved-1f1b", NONE, 20),
    (3, 2, "1f1b", NONE, 20),
    (2, 4, "zbv", NONE, 20),
    (1, 2, "1f1b", OPTIMIZER, 20),
    (2, 2, "interleaved-1f1b", FULL[1], 20),
    (2, 2, "zbv", ONE, 20),
    (1, 3, "zb-h1", TWO, 4),
    (2, 3, "zbv", FULL[3], 4),
    (2, 2, "zb-h1", FULL[5], 4),
    (3, 2, "1f1b", ALL, 4),
    (1, 4, "interleaved-1f1b", FULL[2], 4),
    (4, 1, "zbv", TWO, 4),
    (2, 2, "interleaved-1f1b", FULL[8], 4),
]
EVERY_LAYOUT = [
    (pipeline, data, schedule, setting, 20)
    for pipeline, data in product((1, 2, 3, 4), repeat=2)
    for schedule in (*SCHEDULES, "gpipe", "hanayo")
    for setting in ((NONE, OPTIMIZER, *FULL[(pipeline + data) % 3 :: 3]) if schedule in SCHEDULES else (NONE,))
]
EVERY_SETTING = [
    (2, 2, schedule, setting, 5)
    for schedule in (*SCHEDULES, "gpipe", "looped-bfs", "hanayo", "dualpipe-v", "interleaved-zb")
    for setting in SHARDED
    if schedule != "dualpipe-v" or setting.get("residency") != 1  # its pairs hold two stages at once
]


@pytest.mark.feature("X3")
@pytest.mark.timeout(600)
@ways("pipeline data schedule setting steps", slow=DRAWN, full=EVERY_LAYOUT + EVERY_SETTING)
def test_a_layout_trains_as_one_process_does(pipeline, data, schedule, setting, steps):
    assert compared(pipeline, data, Job([8] * data), schedule, steps=steps, **setting) == []


# Of four layers: with more, AdamW lets rounding grow tenfold in each step, with replicas as well.
@pytest.mark.timeout(600)
@ways("schedule data setting", full=product(["zb-h1", "zbv", "interleaved-zb"], [2, 3], SHARDED))
def test_weights_that_wait_for_w_train_the_same_in_every_setting(schedule, data, setting):
    assert compared(2, data, wide_job(data), schedule, steps=3, **setting) == []


# ---- bits


UNEVEN, WIDE = Job([9, 8, 11], options={"allow_ragged": True}), wide_job(2)


@ways("job schedule", (UNEVEN, "zbv"), (WIDE, "zb-h1"), full=[(UNEVEN, schedule) for schedule in SCHEDULES])
def test_gradients_of_the_three_modes_have_the_same_bits(job, schedule):
    none, *sharded = (
        whole_gradients(2, len(job.rows), job, schedule, **setting) for setting in (NONE, OPTIMIZER, *FULL[6:])
    )

    for other in sharded:
        assert other.keys() == none.keys()
        assert [name for name in none if not torch.equal(none[name], other[name])] == []


# ---- parameters of every kind


class Odd(nn.Module):
    """A scalar, one row, a vector, none at all, a transposed one, three dimensions."""

    def __init__(self):
        super().__init__()
        new = lambda *shape: nn.Parameter(torch.empty(shape, dtype=FLOAT))  # noqa: E731
        self.scale, self.row, self.bias, self.nothing = new(), new(1, WIDTH), new(WIDTH), new(0, WIDTH)
        self.transposed = nn.Parameter(torch.empty(WIDTH, 5, dtype=FLOAT).t())
        self.cube = new(3, WIDTH, 2)

    def forward(self, x):
        hidden = (x @ self.transposed.t()).tanh() @ self.transposed + self.nothing.sum()
        return hidden * self.scale + x * self.row + self.bias + (x @ self.cube).sum((0, 2))[:, None]


@ways("data setting", (2, ONE), slow=[(4, OPTIMIZER), (4, ALL)])
def test_scalars_single_rows_and_parameters_of_any_shape_train(data, setting):
    job = Job([8] * data, lambda: [settle(Odd(), seed) for seed in range(4)])

    assert compared(2, data, job, "interleaved-1f1b", **setting) == []


class Mixed(nn.Module):
    """Parameters of three types."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=FLOAT)
        self.gain = nn.Parameter(torch.empty(7, dtype=torch.float32))
        self.low = nn.Linear(WIDTH, 5, bias=False, dtype=torch.bfloat16)
        self.last = nn.Parameter(torch.empty(3, dtype=FLOAT))

    def forward(self, x):
        low = self.low(x.bfloat16()).double().tanh()
        return self.linear(x) * self.gain.sum().double() + low.sum(-1, keepdim=True) + self.last.sum()


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_parameters_of_several_types_in_one_stage_have_gradients_of_their_types(setting):
    job = Job([8, 8, 8], lambda: [settle(Mixed(), seed) for seed in range(2)])

    found, expected = (whole_gradients(2, 3, job, "1f1b", **each) for each in (setting, NONE))

    assert {value.dtype for value in found.values()} == {FLOAT, torch.float32, torch.bfloat16}
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert compared(2, 3, job, "1f1b", steps=1, tolerance=2e-2, **setting) == []


class Convolution(nn.Module):
    """Its weight lies channels last, which fast kernels want."""

    def __init__(self, seed):
        super().__init__()
        self.inner = settle(nn.Conv2d(4, 4, 3, padding=1, dtype=FLOAT), seed).to(memory_format=torch.channels_last)

    def forward(self, x):
        assert self.inner.weight.is_contiguous(memory_format=torch.channels_last)
        return self.inner(x).tanh()


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_weights_of_convolutions_that_lie_channels_last_train(setting):
    images = [lambda rows, seed=seed: values(seed, rows, 4, 5, 5, dtype=FLOAT) for seed in (1, 2)]
    job = Job([8, 8, 8], lambda: [Convolution(seed) for seed in range(4)], *images)

    assert compared(2, 3, job, "zbv", **setting) == []


@ways("schedule setting", ("interleaved-1f1b", ONE), slow=[("1f1b", OPTIMIZER), ("interleaved-1f1b", TWO)])
def test_stages_and_ranks_without_parameters_train(schedule, setting):
    def layers():
        return [block(0, FLOAT), nn.Tanh(), nn.Identity(), nn.Sigmoid()]

    assert compared(2, 2, Job([8, 8], layers), schedule, **setting) == []


# ---- what is counted


@ways(
    "schedule data setting",
    ("interleaved-1f1b", 2, TWO),
    ("zbv", 2, OPTIMIZER),
    slow=[("zbv", 4, ONE), ("interleaved-1f1b", 4, ALL)],
)
def test_each_gather_and_reduction_of_the_program_is_one_exchange_and_sends_only_what_it_must(schedule, data, setting):
    job = wide_job(data, rows=16, num_layers=8)

    def case(places):
        with pipeline_of(places, job, schedule, **setting) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)  # in which the ranks describe their messages
            counted = Counting(places.transports[1])
            own.step(inputs, target=target)
            program = own.program
            rows = [program.instruction(row) for row in range(*program.offsets[own.rank : own.rank + 2])]
            stage_bytes = {
                stage.index: sum(each.numel() * each.element_size() for each in stage.parameters())
                for stage in own.stages
            }
            moved = [row for row in rows if row.op in (Op.UNSHARD, Op.REDUCE_GRADIENT)]
            return counted.data, [stage_bytes[row.stage] for row in moved]

    for sent, moved in on_mesh(2, data, case):
        assert Counter(peer for peer, _ in sent) == dict.fromkeys({peer for peer, _ in sent}, len(moved))
        assert len({peer for peer, _ in sent}) == data - 1
        assert sum(num_bytes for _, num_bytes in sent) <= 1.02 * (data - 1) / data * sum(moved)


# ---- what modules hold between steps


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_modules_and_the_pipeline_have_the_same_shards_from_construction_on(setting):
    def steps(own, inputs, target):
        listed = dict(own.named_parameters())
        for _ in range(2):
            check_shards(own, listed)
            own.step(inputs, target=target)
            check_shards(own, listed, has_gradients=True)
            own.evaluate(inputs, target=target)
        check_shards(own, listed, has_gradients=True)
        in_layers = {id(each) for layer in layers_of(own) for each in layer.parameters()}
        assert in_layers == {id(each) for each in listed.values()}

    on_pipelines(Job([8, 8, 8]), "interleaved-1f1b", steps, **setting)


def check_shards(own, listed, has_gradients=False):
    """Of three replicas, each has a third of every parameter, and of its gradient."""
    now = dict(own.named_parameters())
    assert now.keys() == listed.keys()
    assert all(now[name] is listed[name] for name in now)
    held = {id(each) for stage in own.stages for each in stage.parameters()}
    assert held == {id(each) for each in now.values()} == {id(each) for each in own.parameters()}
    for each in now.values():
        assert isinstance(each, nn.Parameter)
        assert isinstance(each, DTensor)
        assert each.is_leaf
        assert each.requires_grad
        assert list(each.placements) == [Shard(0)]
        assert each.device_mesh.mesh_dim_names == ("data",)
        assert each.to_local().shape[0] == len(torch.arange(each.shape[0]).chunk(3)[own.replica])
        if has_gradients:
            assert each.grad.placements == each.placements
            assert each.grad.to_local().shape == each.to_local().shape


def live_storages():
    """The bytes of the storage of every tensor of this process, each storage once."""
    gc.collect()
    found = {}
    for tensor in living_instances(torch.Tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.layout is not torch.strided or is_lazy(local):
            continue
        storage = local.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


def storages_between_steps(setting, num_layers):
    """Bytes of each storage that 4 replicas (threads) have made, after construction, and after a step and more."""
    data, begun = 4, live_storages().keys()
    barrier, found = threading.Barrier(data), []

    def note(places):
        barrier.wait(MAX_WAIT_S)
        if places.index == 0:
            found.append([size for key, size in live_storages().items() if key not in begun])
        barrier.wait(MAX_WAIT_S)

    def case(places):
        job = wide_job(data, rows=4, num_layers=num_layers)
        with pipeline_of(places, job, "interleaved-1f1b", stages_per_rank=num_layers, **setting) as own:
            note(places)
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            own.evaluate(inputs, target=target)
            note(places)

    on_mesh(1, data, case)
    return found


WEIGHT, UNIT = 256 * 256 * 8, 256 * 257 * 8


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_whole_weights_and_gradients_are_not_kept_between_steps(setting):
    """The replicas together hold one set of weights; buffers of exchanges stay, each as large as a unit.

    Where units are gathered one by one, each replica has a buffer for gathers and one for sums, and no whole unit.
    """
    made, stepped = storages_between_steps(setting, 6)

    assert 6 * UNIT <= sum(made) <= 1.1 * 6 * UNIT
    assert WEIGHT not in stepped
    assert 2 * 6 * UNIT <= sum(size for size in stepped if size < WEIGHT) <= 2.2 * 6 * UNIT
    if setting is ONE:
        assert not any(size >= UNIT for size in made)
        assert sum(size >= UNIT for size in stepped) <= 2 * 4
