"""What adds up in the gradients of replicas, with shards or without: ties, steps, main gradients, frozen parameters."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.local_pipelines import WIDTH, float_layers, named, settle, values, zero
from tests.support.mesh_pipelines import (
    FLOAT,
    MICROBATCHES,
    Job,
    Rows,
    assert_near,
    gradients_after,
    gradients_of_steps,
    on_mesh,
    on_pipelines,
    two_steps,
    whole,
)
from tests.support.sharded_pipelines import (
    ALL,
    IN_PLACE,
    NONE,
    ONE,
    OPTIMIZER,
    TWO,
    compared,
    tied_layers,
    ways,
)

PLAN = [True, True, False, False, True, False, True]
"""Whether each step is outside of no_sync()."""


# ---- ties


def tied_twice():
    """One parameter of three stages, and another of two."""
    layers = float_layers(FLOAT, 8)
    layers[3][1].weight = layers[7][1].weight = layers[0][1].weight
    layers[5][1].bias = layers[2][1].bias
    return layers


@pytest.mark.feature("X23")
@ways(
    "pipeline data schedule setting",
    (2, 2, "1f1b", IN_PLACE),
    (2, 2, "zbv", ONE),
    (1, 2, "interleaved-1f1b", OPTIMIZER),
    slow=[
        (2, 2, "zbv", NONE),
        (2, 2, "1f1b", TWO),
        (2, 3, "interleaved-1f1b", ONE),
        (2, 2, "zb-h1", ONE),
        (2, 2, "zb-h1", OPTIMIZER),
        (3, 2, "zbv", TWO),
    ],
)
def test_what_is_tied_over_ranks_or_over_stages_of_one_rank_counts_once(pipeline, data, schedule, setting):
    """zbv has the first and the last stage on one rank: they are one unit."""
    job = Job([8] * data, tied_layers)

    assert compared(pipeline, data, job, schedule, **setting) == []


@ways("schedule setting", ("zbv", ONE), slow=[("1f1b", OPTIMIZER), ("interleaved-1f1b", ONE)])
def test_parameters_may_be_tied_in_several_groups(schedule, setting):
    job = Job([8, 8], tied_twice)

    expected = gradients_of_steps(job, [1, 1])
    expected["5.1.bias"] = expected["2.1.bias"]
    assert_near(gradients_after(job, schedule, two_steps, **setting), expected)


# ---- several steps


@ways("schedule setting", ("1f1b", NONE), ("zbv", IN_PLACE), ("zbv", ONE), ("1f1b", OPTIMIZER), slow=[("1f1b", ALL)])
def test_gradients_of_earlier_steps_count_once_with_and_without_no_sync(schedule, setting):
    job = Job([8, 8, 8], tied_layers)

    def steps(own, inputs, target):
        for number, is_synced in enumerate(PLAN):
            if is_synced:
                own.step(inputs * (number + 1), target=target)
                continue
            with own.no_sync():
                own.step(inputs * (number + 1), target=target)

    expected = gradients_of_steps(job, [number + 1 for number in range(len(PLAN))])
    assert_near(gradients_after(job, schedule, steps, **setting), expected)


@ways("to_none setting", (False, NONE), (True, NONE), (False, IN_PLACE), (False, ONE), (True, OPTIMIZER))
def test_gradients_that_are_zeroed_in_between_are_gone(to_none, setting):
    job = Job([8, 8])

    def steps(own, inputs, target):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, foreach=True)
        own.step(inputs * 3, target=target)
        if setting["shard"] == "none":  # shards keep what is not summed elsewhere
            with own.no_sync():
                own.step(inputs * 2, target=target)
        optimizer.zero_grad(set_to_none=to_none)
        with own.no_sync():
            own.step(inputs * 5, target=target)
        own.step(inputs, target=target)

    assert_near(gradients_after(job, "interleaved-1f1b", steps, **setting), gradients_of_steps(job, [5, 1]))


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_weights_that_a_caller_changes_between_steps_are_those_that_the_next_one_uses(setting):
    job = Job([8, 8])

    def steps(own, inputs, target):
        own.step(inputs, target=target)
        with torch.no_grad():
            for each in own.parameters():
                each.mul_(0.5)
                each.data.add_(0.125)
        zero(own)
        own.step(inputs, target=target)

    layers = job.make_layers()
    with torch.no_grad():
        for _, each in named(layers):
            each.mul_(0.5).add_(0.125)
    changed = Job([8, 8], lambda: layers)
    assert_near(gradients_after(job, "zbv", steps, **setting), gradients_of_steps(changed, [1]))


# ---- types


@ways(
    "dtype setting",
    (torch.bfloat16, IN_PLACE),
    (torch.bfloat16, ONE),
    slow=[(torch.float32, NONE), (torch.float32, OPTIMIZER)],
)
def test_main_gradients_are_summed_in_float32(dtype, setting):
    def layers():
        return [settle(nn.Linear(WIDTH, WIDTH, dtype=dtype), seed) for seed in range(4)]

    job = Job([8, 8, 8], layers)
    job.inputs, job.targets = (lambda rows: values(1, rows, WIDTH, dtype=dtype)), (lambda rows: values(2, rows, WIDTH))
    job.loss = lambda output, target: ((output.float() - target) ** 2).mean()

    def case(places, job, microbatches, setting):
        options = {"main_gradients": True, "mesh": places}
        with ps.Pipeline(job.make_layers(), "zbv", microbatches, job.loss, **options, **setting) as own:
            assert all(each.main_grad is None for each in own.parameters())
            two_steps(own, *job.of(own.replica))
            assert all(each.main_grad.dtype == torch.float32 for each in own.parameters())
            assert all(each.grad is None for each in own.parameters())
            return Rows(own, "main_grad")

    found = whole(on_mesh(2, 3, case, job, MICROBATCHES, setting), 3)

    assert_near(found, whole(on_mesh(2, 1, case, replace(job, rows=[24]), 3 * MICROBATCHES, NONE), 1), 1e-5)
    assert_near(found, whole(on_mesh(2, 3, case, job, MICROBATCHES, NONE), 3), 1e-6)


# ---- frozen parameters


def frozen_layers():
    found = float_layers(FLOAT, 8)
    for each in (found[0], found[3], found[5][1], found[6][0]):
        each.requires_grad_(False)
    return found


@ways("schedule setting", ("1f1b", NONE), ("zbv", ONE), slow=[("interleaved-1f1b", OPTIMIZER), ("zbv", OPTIMIZER)])
def test_frozen_layers_stay_and_others_train(schedule, setting):
    assert compared(2, 3, Job([8, 8, 8], frozen_layers), schedule, **setting) == []


@ways("schedule setting", ("zbv", ONE), slow=[("interleaved-1f1b", OPTIMIZER)])
def test_parameters_may_be_frozen_and_trained_again_between_steps(schedule, setting):
    job = Job([8, 8])
    frozen = [(), (0, 1, 2), (0, 5), tuple(range(8)), (7,), ()]

    def steps(own, inputs, target):
        found = []
        for step, indices in enumerate(frozen):
            for name, each in own.named_parameters():
                each.requires_grad_(int(name.partition(".")[0]) not in indices)
            zero(own)
            if len(indices) < 8:
                own.step(inputs * (step + 1), target=target)
            else:
                own.evaluate(inputs, target=target)
            found.append(Rows(own))
        return found

    for step, ranks in enumerate(zip(*on_pipelines(job, schedule, steps, **setting), strict=True)):
        layers = job.make_layers()
        for index in frozen[step]:
            layers[index].requires_grad_(False)
        factors = [step + 1] if len(frozen[step]) < 8 else []
        assert_near(whole(list(ranks), 2), gradients_of_steps(Job([8, 8], lambda own=layers: own), factors))


# ---- norms


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_norms_are_those_of_one_process_and_have_the_same_bits_on_all_ranks(setting):
    job = Job([8, 8, 8], tied_layers)

    def clipped(bound):
        def step(own, inputs, target):
            own.step(inputs, target=target)
            return own.clip_grad_norm_(bound).item(), Rows(own)

        return step

    for bound in (0.01, 1e6):
        layers = job.make_layers()
        gradients_of_steps(Job(job.rows, lambda own=layers: own), [1])
        own = list(dict.fromkeys(each for _, each in named(layers)))
        expected = torch.nn.utils.clip_grad_norm_(own, bound).item()
        ranks = on_pipelines(job, "zbv", clipped(bound), **setting)
        assert len({norm for norm, _ in ranks}) == 1
        assert ranks[0][0] == pytest.approx(expected, rel=1e-12)
        assert_near(whole([rows for _, rows in ranks], 3), {name: each.grad for name, each in named(layers)})
