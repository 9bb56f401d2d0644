"""Layers that pass on their weights, or use them unusually, train in sharded pipelines as in others."""

import torch
from torch import nn

import penstock as ps
from penstock.models import Skip
from tests.execute.test_overlap import InTwoThreads
from tests.support.local_pipelines import WIDTH, Around, block, float_layers, settle, values, zero
from tests.support.mesh_pipelines import (
    FLOAT,
    MICROBATCHES,
    Job,
    Rows,
    assert_near,
    gradients_after,
    gradients_of_steps,
    layers_of,
    on_mesh,
    on_pipelines,
    pipeline_of,
    two_steps,
    whole,
)
from tests.support.sharded_pipelines import (
    ALL,
    NONE,
    ONE,
    OPTIMIZER,
    TWO,
    compared,
    sequence_job,
    ways,
    whole_gradients,
)

# ---- weights that outlive the forward of their stage


class Table(nn.Module):
    """Gives the first rows of its table, a view of a parameter, whatever comes in."""

    def __init__(self, seed):
        super().__init__()
        self.table = nn.Parameter(torch.empty(4, WIDTH, dtype=FLOAT))
        settle(self, seed)

    def forward(self, x):
        return self.table[: len(x)]


def table_layers():
    """Every stage of two layers gives a view of its table."""
    return [layer for seed in range(4) for layer in (block(seed, FLOAT), Table(seed))]


def assert_as_replicas(pipeline, data, job, schedule, setting, **options):
    """Gradients are those of replicas, of which other tests say that they are right."""
    found, expected = (whole_gradients(pipeline, data, job, schedule, **options, **each) for each in (setting, NONE))
    assert found.keys() == expected.keys()
    assert_near(found, expected)


@ways(
    "pipeline schedule setting",
    (1, "interleaved-1f1b", OPTIMIZER),
    (2, "zbv", ONE),
    slow=[(2, "interleaved-1f1b", OPTIMIZER), (2, "zb-h1", ONE)],
)
def test_outputs_that_are_views_of_weights_train(pipeline, schedule, setting):
    split = {"stages_per_rank": 4} if pipeline == 1 else {}

    assert_as_replicas(pipeline, 2, Job([8, 8], table_layers), schedule, setting, **split)


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_returned_outputs_may_be_views_of_weights(setting):
    def outputs(own, inputs, target):
        stepped = own.step(inputs, target=target, return_outputs=True).outputs
        return stepped, own.evaluate(inputs, return_outputs=True).outputs

    ranks = on_pipelines(Job([8, 8], table_layers), "interleaved-1f1b", outputs, **setting)

    expected = table_layers()[-1].table.detach()[:2].repeat(MICROBATCHES, 1)
    for found in (*ranks[1], *ranks[3]):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Handing(Around):
    """Hands its weight on to a later layer, or uses the one that another passes on."""

    def __init__(self, seed, puts):
        super().__init__(seed, FLOAT)
        self.skip, self.puts = Skip("weight"), puts

    def forward(self, x):
        if self.puts:
            self.skip.put(self.inner[1].weight)
            return self.inner(x)
        return self.inner(x) @ self.skip.get()


@ways("schedule setting", ("zbv", ONE), slow=[("1f1b", OPTIMIZER), ("interleaved-1f1b", ONE)])
def test_weights_that_are_passed_on_by_skips_train(schedule, setting):
    def layers():
        return [Handing(0, True), *(block(seed, FLOAT) for seed in range(1, 7)), Handing(7, False)]

    assert compared(2, 2, Job([8, 8], layers), schedule, **setting) == []


class CarriedWeight(nn.Module):
    """Carries its weight from slice to slice."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), seed)
        self.carry = ps.Carry()

    def forward(self, x):
        before = self.carry.get()
        self.carry.put(self.linear.weight)
        return self.linear(x) if before is None else nn.functional.linear(x, before, self.linear.bias)


@ways("schedule setting", ("seq1f1b", ONE), slow=[("breadth-depth", OPTIMIZER)])
def test_weights_that_slices_carry_train(schedule, setting):
    job = sequence_job(lambda: [CarriedWeight(seed) for seed in range(4)], 4)

    assert compared(2, 2, job, schedule, steps=2, slices=2, **setting) == []


# ---- layers without gradients, and parameters without


class Detached(Around):
    """Lets no gradient through."""

    def forward(self, x):
        return self.inner(x.detach())


@ways("schedule setting", ("zb-h1", ONE), slow=[("interleaved-1f1b", OPTIMIZER), ("zbv", ONE)])
def test_stages_that_get_no_gradient_end_as_those_of_replicas(schedule, setting):
    def layers():
        return [*float_layers(FLOAT, 4), Detached(4, FLOAT), *(block(seed, FLOAT) for seed in (5, 6, 7))]

    assert_as_replicas(2, 2, Job([8, 8], layers), schedule, setting)


class Whole(nn.Module):
    """Holds parameters of integers and of booleans, which are never trained."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), seed)
        self.codes = nn.Parameter(torch.arange(WIDTH + 1).to(torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 3 != seed % 3, requires_grad=False)

    def forward(self, x):
        return self.linear(x * self.mask) + self.codes[:WIDTH].double()


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_parameters_that_are_no_floats_are_gathered(setting):
    job = Job([8, 8, 8, 8], lambda: [Whole(seed) for seed in range(4)])

    def step(own, inputs, target):
        return own.step(inputs, target=target).loss, Rows(own)

    ranks, replicas = (on_pipelines(job, "interleaved-1f1b", step, **each) for each in (setting, NONE))

    assert [loss for loss, _ in ranks] == [loss for loss, _ in replicas]
    rows = [rows for _, rows in ranks]
    assert_near(whole(rows, 4), whole([rows for _, rows in replicas], 4))
    weights = whole(rows, 4, "weights")
    assert weights["0.codes"].tolist() == list(range(WIDTH + 1))
    assert weights["0.codes"].dtype == torch.int8
    assert weights["0.mask"].dtype == torch.bool


# ---- what is around layers


class Watched(nn.Module):
    """Looks at its parameters from hooks of modules."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), seed)
        self.seen = set()
        self.linear.register_forward_pre_hook(self.look)
        self.linear.register_forward_hook(self.look)
        self.linear.register_full_backward_hook(self.look)

    def look(self, module, *_):
        self.seen.add((type(module.weight), tuple(module.weight.shape), module.weight.is_leaf))

    def forward(self, x):
        return self.linear(x)


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_hooks_of_modules_see_whole_ordinary_parameters(setting):
    job = Job([8, 8], lambda: [Watched(seed) for seed in range(4)])

    def seen(own, inputs, target):
        own.step(inputs, target=target)
        own.evaluate(inputs, target=target)
        return [layer.seen for layer in layers_of(own)]

    for found in on_pipelines(job, "interleaved-1f1b", seen, **setting):
        assert found == [{(nn.Parameter, (WIDTH, WIDTH), True)}] * 2
    assert compared(2, 2, job, "interleaved-1f1b", **setting) == []


@ways("schedule setting", ("zbv", ONE), slow=[("1f1b", OPTIMIZER)])
def test_a_step_under_autocast_has_the_bits_of_replicas(schedule, setting):
    def layers():
        return [settle(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), 3) for _ in range(4)]

    job = Job([8, 8, 8], layers, *(lambda rows, seed=seed: values(seed, rows, WIDTH) for seed in (1, 2)))

    def steps(own, inputs, target):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                zero(own)
                own.step(inputs, target=target)

    found, expected = (gradients_after(job, schedule, steps, **each) for each in (setting, NONE))

    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@ways("setting", (TWO,), slow=[(ALL,), (OPTIMIZER,)])
def test_pairs_that_run_in_two_threads_train(setting):
    job = Job([16, 16])

    def case(places):
        with pipeline_of(places, job, "dualpipe-v", overlap=InTwoThreads(), **setting) as own:
            two_steps(own, *job.of(own.replica))
            return Rows(own)

    assert_near(whole(on_mesh(2, 2, case), 2), gradients_of_steps(job, [1, 1]))


def test_large_settings_are_as_good_as_all():
    job = Job([8, 8])
    large = {"shard": "full", "residency": 100, "look_ahead": 1000}
    found, expected = (whole_gradients(2, 2, job, "zbv", **each) for each in (large, ALL))

    assert all(torch.equal(found[name], expected[name]) for name in expected)
