"""What adds up in the gradients of sharded pipelines: ties, several steps, main gradients, frozen parameters, norms."""

import pytest
import torch
from torch import nn

import penstock as ps
from tests.local_pipelines import (
    WIDTH,
    float_layers,
    named,
    settle,
    square_loss,
    token_layers,
    token_loss,
    values,
)
from tests.mesh_pipelines import FLOAT, MICROBATCHES, Job, on_mesh, pipeline_of, put_together, rows_of, train
from tests.sharded_pipelines import ALL, NONE, ONE, OPTIMIZER, TWO, adamw, compared, name_of, zero
from tests.test_replicas import gradients_of_steps, shared_layers, tokens

PLAN = [True, True, False, False, True, False, True]
"""Whether each step is outside of no_sync()."""


class Rows:
    """What a rank has of its gradients, for `put_together`."""

    def __init__(self, own, attribute="grad"):
        self.gradients = {name: rows_of(getattr(each, attribute)) for name, each in own.named_parameters()}
        self.weights = {name: rows_of(each) for name, each in own.named_parameters()}


def whole(ranks, data, kind="gradients"):
    """The whole tensors of all ranks, by name; they must be equal wherever they are twice."""
    found = {}
    for own in put_together(ranks, data):
        for name, value in getattr(own, kind).items():
            if name in found:
                assert (value is None) == (found[name] is None)
                assert value is None or torch.equal(value, found[name])
            found[name] = value
    return found


def assert_near(found, expected, tolerance=1e-12):
    for name, value in found.items():
        known = expected[name if name in expected else "0." + name.partition(".")[2]]
        if known is None or value is None:
            assert value is known, name
        else:
            torch.testing.assert_close(value, known, rtol=tolerance, atol=tolerance, msg=name)


# ---- ties


def tied_layers():
    """The weight of the first layer is that of the last one."""
    layers = float_layers(FLOAT, 8)
    layers[7][1].weight = layers[0][1].weight
    return layers


def tied_twice():
    """One parameter of three stages, and another of two."""
    layers = float_layers(FLOAT, 8)
    layers[3][1].weight = layers[7][1].weight = layers[0][1].weight
    layers[5][1].bias = layers[2][1].bias
    return layers


TIED = [
    (2, 2, "1f1b"),
    (2, 2, "zbv"),
    (2, 3, "interleaved-1f1b"),
    (1, 2, "interleaved-1f1b"),
    (2, 2, "zb-h1"),
    (3, 2, "zbv"),
]


@pytest.mark.parametrize("setting", [ONE, TWO, OPTIMIZER], ids=name_of)
@pytest.mark.parametrize(("pipeline", "data", "schedule"), TIED)
def test_what_is_tied_over_ranks_or_over_stages_of_one_rank_counts_once(pipeline, data, schedule, setting):
    """zbv has the first and the last stage on one rank: they are one unit."""
    job = Job([8] * data, tied_layers)

    assert compared(pipeline, data, job, schedule, **setting) == []


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-1f1b"])
def test_parameters_may_be_tied_in_several_groups(schedule, setting):
    job = Job([8, 8], tied_twice)

    def case(places):
        with pipeline_of(places, job, schedule, **setting) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            own.step(inputs, target=target)
            return Rows(own)

    expected = gradients_of_steps(job, [1, 1])
    aliases = {"3.1.weight": "0.1.weight", "7.1.weight": "0.1.weight", "5.1.bias": "2.1.bias"}
    assert_near(whole(on_mesh(2, 2, case), 2), expected | {name: expected[own] for name, own in aliases.items()})


# ---- several steps


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER, ALL], ids=name_of)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_gradients_of_earlier_steps_count_once_with_and_without_no_sync(schedule, setting):
    job = Job([8, 8, 8], shared_layers)

    def case(places):
        with pipeline_of(places, job, schedule, **setting) as own:
            inputs, target = job.of(own.replica)
            for number, is_synced in enumerate(PLAN):
                if is_synced:
                    own.step(inputs * (number + 1), target=target)
                    continue
                with own.no_sync():
                    own.step(inputs * (number + 1), target=target)
            return Rows(own)

    expected = gradients_of_steps(job, [number + 1 for number in range(len(PLAN))])
    assert_near(whole(on_mesh(2, 3, case), 3), expected | {"3.1.weight": expected["0.1.weight"]})


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_zeroed_in_between_are_gone(to_none, setting):
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", **setting) as own:
            inputs, target = job.of(own.replica)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1, foreach=True)
            own.step(inputs * 3, target=target)
            optimizer.zero_grad(set_to_none=to_none)
            own.step(inputs * 5, target=target)
            own.step(inputs, target=target)
            return Rows(own)

    assert_near(whole(on_mesh(2, 2, case), 2), gradients_of_steps(job, [5, 1]))


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_weights_that_a_caller_changes_between_steps_are_those_that_the_next_one_uses(setting):
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "zbv", **setting) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            with torch.no_grad():
                for each in own.parameters():
                    each.mul_(0.5)
                    each.data.add_(0.125)
            zero(own)
            own.step(inputs, target=target)
            return Rows(own)

    layers = job.make_layers()
    with torch.no_grad():
        for _, each in named(layers):
            each.mul_(0.5).add_(0.125)
    square_loss(nn.Sequential(*layers)(job.inputs(16)), job.targets(16)).backward()
    assert_near(whole(on_mesh(2, 2, case), 2), {name: each.grad for name, each in named(layers)})


# ---- types


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_main_gradients_are_summed_in_float32(dtype, setting):
    def layers():
        return [settle(nn.Linear(WIDTH, WIDTH, dtype=dtype), seed) for seed in range(4)]

    job = Job([8, 8, 8], layers)
    job.inputs, job.targets = (lambda rows: values(1, rows, WIDTH, dtype=dtype)), (lambda rows: values(2, rows, WIDTH))
    job.loss = lambda output, target: ((output.float() - target) ** 2).mean()

    def case(places, microbatches, setting):
        options = {"main_gradients": True, "mesh": places}
        with ps.Pipeline(job.make_layers(), "zbv", microbatches, job.loss, **options, **setting) as own:
            whole_batch = places.num_replicas == 1
            inputs, target = (job.inputs(24), job.targets(24)) if whole_batch else job.of(own.replica)
            for _ in range(2):
                own.step(inputs, target=target)
            assert all(each.main_grad.dtype == torch.float32 for each in own.parameters())
            assert all(each.grad is None for each in own.parameters())
            return Rows(own, "main_grad")

    found = whole(on_mesh(2, 3, case, MICROBATCHES, setting), 3)
    expected = whole(on_mesh(2, 1, case, 3 * MICROBATCHES, NONE), 1)
    replicas = whole(on_mesh(2, 3, case, MICROBATCHES, NONE), 3)

    assert_near(found, expected, 1e-5)
    assert_near(found, replicas, 1e-6)


# ---- frozen parameters


def frozen_layers():
    found = float_layers(FLOAT, 8)
    for each in (found[0], found[3], found[5][1], found[6][0]):
        each.requires_grad_(False)
    return found


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_frozen_layers_stay_and_others_train(schedule, setting):
    job = Job([8, 8, 8], frozen_layers)

    def steps(places):
        with pipeline_of(places, job, schedule, **setting) as own:
            inputs, target = job.of(own.replica)
            trained = [each for each in own.parameters() if each.requires_grad]
            optimizer = adamw(trained) if trained else None
            for _ in range(3):
                own.step(inputs, target=target)
                if optimizer:
                    optimizer.step()
                    optimizer.zero_grad()
            own.step(inputs, target=target)
            return Rows(own)

    layers = job.make_layers()
    optimizer = adamw([each for _, each in named(layers) if each.requires_grad])
    for number in range(4):
        square_loss(nn.Sequential(*layers)(job.inputs(24)), job.targets(24)).backward()
        if number < 3:
            optimizer.step()
            optimizer.zero_grad()

    ranks = on_mesh(2, 3, steps)
    assert_near(whole(ranks, 3, "weights"), {name: each.detach() for name, each in named(layers)})
    assert_near(whole(ranks, 3), {name: each.grad for name, each in named(layers)})


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_parameters_may_be_frozen_and_trained_again_between_steps(schedule, setting):
    job = Job([8, 8])
    frozen = [(), (0, 1, 2), (0, 5), tuple(range(8)), (7,), ()]

    def case(places):
        with pipeline_of(places, job, schedule, **setting) as own:
            inputs, target = job.of(own.replica)
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

    for step, ranks in enumerate(zip(*on_mesh(2, 2, case), strict=True)):
        layers = job.make_layers()
        for index in frozen[step]:
            layers[index].requires_grad_(False)
        if len(frozen[step]) < 8:
            square_loss(nn.Sequential(*layers)(job.inputs(16) * (step + 1)), job.targets(16)).backward()
        assert_near(whole(list(ranks), 2), {name: each.grad for name, each in named(layers)})


# ---- norms


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_norms_are_those_of_one_process_and_have_the_same_bits_on_all_ranks(setting):
    job = Job([8, 8, 8], tied_layers)

    def case(places, bound):
        with pipeline_of(places, job, "zbv", **setting) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            return own.clip_grad_norm_(bound).item(), Rows(own)

    for bound in (0.01, 1e6):
        layers = job.make_layers()
        square_loss(nn.Sequential(*layers)(job.inputs(24)), job.targets(24)).backward()
        own = list(dict.fromkeys(each for _, each in named(layers)))
        expected = torch.nn.utils.clip_grad_norm_(own, bound).item()
        ranks = on_mesh(2, 3, case, bound)
        assert len({norm for norm, _ in ranks}) == 1
        assert ranks[0][0] == pytest.approx(expected, rel=1e-12)
        assert_near(whole([rows for _, rows in ranks], 3), {name: each.grad for name, each in named(layers)})


def test_sharded_and_other_steps_of_a_scaled_loss_agree():
    """A scale that nothing overflows: losses, and gradients that are scaled."""
    job = Job([8, 8], lambda: token_layers(FLOAT), tokens, lambda rows: tokens(rows + 1)[1:], token_loss)

    def gradients(setting):
        ranks = on_mesh(2, 2, lambda at: train(at, job, "1f1b", 1, scale_loss=lambda loss: loss * 1024.0, **setting))
        return ranks[0].losses, put_together(ranks, 2)[0].gradients

    (losses, found), (expected_losses, expected) = gradients(ONE), gradients(NONE)

    assert losses == expected_losses
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in found)
