"""Gradients that are averaged over replicas are those of their sum, and are as large as one replica's until then."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from tests.support.local_pipelines import WIDTH, error_of, float_layers, settle, square_loss, values, zero
from tests.support.mesh_pipelines import (
    FLOAT,
    Job,
    assert_near,
    gradients_after,
    gradients_of_steps,
    on_mesh,
    one_step,
    pipeline_of,
    two_steps,
)
from tests.support.sharded_pipelines import (
    IN_PLACE,
    NONE,
    ONE,
    OPTIMIZER,
    compared,
    tied_layers,
    token_job,
    token_targets,
    ways,
    wide_job,
)

MEAN = {"replica_gradients": "mean"}
UNEVEN = Job([9, 8, 11], options={"allow_ragged": True})
TIED = Job([8, 8, 8], tied_layers)
COUNTED = token_job((8, 12), token_targets, count=lambda target: int((target != -100).sum()))


@pytest.mark.feature("X8")
@ways(
    "job schedule setting",
    (UNEVEN, "zbv", NONE),
    (UNEVEN, "1f1b", IN_PLACE),
    (COUNTED, "interleaved-1f1b", OPTIMIZER),
    (TIED, "zbv", ONE),
    slow=[
        (Job([8, 8]), "dualpipe", NONE),
        (Job([8, 8]), "chimera", ONE),
        (TIED, "1f1b", NONE),
        (wide_job(2), "zb-h1", ONE),
        (wide_job(3), "zb-h1", NONE),
        (COUNTED, "1f1b", NONE),
    ],
)
def test_training_with_means_is_that_of_one_process(job, schedule, setting):
    """AdamW with clipped gradients: losses, norms, weights and gradients."""
    assert compared(2, len(job.rows), job, schedule, **setting, **MEAN) == []


@ways("schedule setting", ("1f1b", NONE), ("zbv", IN_PLACE), ("zbv", ONE))
def test_gradients_of_earlier_steps_count_once(schedule, setting):
    def steps(own, inputs, target):
        own.step(inputs * 7, target=target)
        zero(own)
        for number in (1, 2):
            own.step(inputs * number, target=target)
        with own.no_sync():
            own.step(inputs * 3, target=target)
        own.step(inputs * 4, target=target)

    assert_near(gradients_after(TIED, schedule, steps, **setting, **MEAN), gradients_of_steps(TIED, [1, 2, 3, 4]))


class Balanced(nn.Module):
    """A layer that adds a loss of its own."""

    def __init__(self, seed):
        super().__init__()
        self.inner = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), seed)
        self.added = ps.AuxiliaryLoss("balance", 0.5)

    def forward(self, features):
        outputs = self.inner(features)
        self.added.add(outputs.square().mean())
        return outputs


@ways("setting", (NONE,), (ONE,))
def test_scaled_losses_and_those_that_layers_add_are_averaged_too(setting):
    job = Job([8, 16], lambda: [Balanced(seed) for seed in range(4)])
    gradients, expected = (
        gradients_after(job, "zbv", two_steps, scale_loss=scale, **setting, **options)
        for scale, options in ((8.0, MEAN), (None, {}))
    )

    assert_near(gradients, {name: 8 * gradient for name, gradient in expected.items()})


@ways("setting", (NONE,), (ONE,))
def test_main_gradients_are_averaged(setting):
    job = Job([8, 8, 8], lambda: float_layers(torch.float16, 4), options={"main_gradients": True})
    job.inputs, job.targets = (
        (lambda rows, seed=seed: values(seed, rows, WIDTH, dtype=torch.float16)) for seed in (1, 2)
    )
    norms = [
        on_mesh(2, 3, lambda places, options=options: norm_after(places, job, setting | options))[0]
        for options in (MEAN, {})
    ]

    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def norm_after(places, job, options):
    with pipeline_of(places, job, "1f1b", **options) as own:
        one_step(own, *job.of(own.replica))
        assert all(parameter.main_grad.dtype == torch.float32 for parameter in own.parameters())
        return float(own.clip_grad_norm_(1e9))


# ---- float16

SMALLEST = 2.0**-24
"""The smallest number of float16 that is larger than 0; half of it is rounded to 0."""


def unit_layers():
    layers = [nn.Linear(1, 1, bias=False, dtype=torch.float16) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return layers


@ways("setting", (NONE,), (IN_PLACE,), (ONE,))
def test_gradients_that_float16_loses_when_they_are_divided_are_there_with_means(setting):
    """The gradient of an output is the smallest number in the loss of one replica, and half of it in that of two."""
    job = Job([4, 4], unit_layers)
    job.inputs = job.targets = lambda rows: torch.full((rows, 1), 64.0, dtype=torch.float16)
    job.loss = lambda outputs, target: (outputs * (SMALLEST * 4)).mean()

    default = gradients_after(job, "1f1b", one_step, **setting)
    averaged = gradients_after(job, "1f1b", one_step, **setting, **MEAN)

    assert {name: float(gradient) for name, gradient in default.items()} == dict.fromkeys(("0.weight", "1.weight"), 0)
    exact = 64 * SMALLEST * 4
    assert {name: float(gradient) for name, gradient in averaged.items()} == dict.fromkeys(default, exact)


# ---- what is refused


def test_an_unknown_way_of_gradients_is_refused():
    error = error_of(ps.Pipeline, float_layers(), "1f1b", 4, square_loss, ranks=1, replica_gradients="average")

    assert isinstance(error, ConfigError)
    assert "expected one of sum, mean" in str(error)


def test_all_ranks_must_be_told_the_same():
    def case(places):
        options = MEAN if places.replica else {}
        return str(error_of(pipeline_of, places, Job([8, 8]), "1f1b", **options))

    for text in on_mesh(2, 2, case):
        assert "disagree on replica_gradients" in text


def test_losses_with_counts_of_their_own_are_averaged_too():
    def losses(output, target):
        return {"all": square_loss(output, target), "few": square_loss(output[:3], target[:3])}

    def counts(target):
        return {"all": len(target), "few": min(3, len(target))}

    def gradients(own, inputs, target):
        own.step(inputs, target=target)

    job = Job([8, 8], loss=losses, options={"count": counts})
    assert_near(gradients_after(job, "1f1b", gradients, **MEAN), gradients_after(job, "1f1b", gradients))
