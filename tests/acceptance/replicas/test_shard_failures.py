"""A failure in one replica, with shards or without, is one error on all ranks, and the steps behind it are right."""

import time
from itertools import count, product
from threading import Event

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import DeadlineExceeded
from tests.support.local_pipelines import WIDTH, error_of, settle, square_loss, zero
from tests.support.mesh_pipelines import (
    FLOAT,
    MICROBATCHES,
    Job,
    Rows,
    assert_near,
    gradients_after,
    gradients_of_steps,
    index_of,
    layers_of,
    on_mesh,
    on_pipelines,
    train_alone,
    whole,
)
from tests.support.sharded_pipelines import ALL, NONE, ONE, OPTIMIZER, TWO, adamw, name_of, settings, ways

DEADLINE_S = 60.0
PLACES = ("forward", "backward", "weight", "loss")


class Raising(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("planted")


class Planted(nn.Module):
    """Fails in the forward of this number, or in its backward, if it is told to; and pauses in its next forward."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), seed)
        self.fails, self.at, self.num_forwards, self.pause = "", 0, 0, None

    def forward(self, x):
        pause, self.pause = self.pause, None
        if pause is not None:
            pause()
        self.num_forwards += 1
        is_now = self.num_forwards == self.at + 1
        if is_now and self.fails == "forward":
            raise ValueError("planted")
        weight = self.linear.weight
        if is_now and self.fails == "weight" and torch.is_grad_enabled():
            weight = Raising.apply(weight)
        hidden = nn.functional.linear(x, weight, self.linear.bias).tanh()
        return Raising.apply(hidden) if is_now and self.fails == "backward" and torch.is_grad_enabled() else hidden


def planted_layers():
    return [Planted(seed) for seed in range(8)]


class Failing:
    """The loss of a rank, which may fail too."""

    def __init__(self):
        self.fails = False

    def __call__(self, output, target):
        if self.fails:
            raise ValueError("planted")
        return square_loss(output, target)


def run_with_a_failure(places, job, schedule, setting, bad, place, at):
    """A step, one that fails on a rank, another one that fails there, and two steps; the errors, and all shards."""
    layers, loss = job.make_layers(), Failing()
    options = {"mesh": places, "deadline_s": DEADLINE_S} | setting
    with ps.Pipeline(layers, schedule, MICROBATCHES, loss, **options) as own:
        inputs, target = job.of(own.replica)
        optimizer = adamw(own.parameters())
        errors, losses = [], []
        for step in range(5):
            fails = step in (1, 2) and places.index == bad
            loss.fails = fails and place == "loss"
            for layer in layers:
                layer.fails, layer.at, layer.num_forwards = place if fails else "", at, 0
            if step in (1, 2):
                begin_s = time.monotonic()
                errors.append((error_of(own.step, inputs, target=target), time.monotonic() - begin_s))
                held = [each for stage in own.stages for each in stage.parameters()]
                assert all(hasattr(each, "placements") == (setting is not NONE) for each in held)
                zero(own)
                continue
            losses.append(own.step(inputs, target=target).loss)
            own.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        evaluated = own.evaluate(inputs, target=target).loss
        own.step(inputs, target=target)
        return errors, losses, evaluated, Rows(own)


def loaded(weights):
    layers = planted_layers()
    nn.Sequential(*layers).load_state_dict(weights)
    return layers


ANYWHERE = [
    (2, 2, schedule, setting, bad, place, at)
    for schedule, last in (("interleaved-1f1b", (1, 3)), ("zbv", (0, 2)))  # with the ranks that hold the last stage
    for setting in (ONE, TWO, ALL, OPTIMIZER)
    for bad, place, at in product(range(4), PLACES, (0, 2, 3))
    if place != "loss" or (bad in last and not at)
]


@ways(
    "pipeline data schedule setting bad place at",
    (2, 2, "1f1b", NONE, 2, "forward", 0),
    (2, 2, "zbv", ONE, 1, "backward", 2),
    (2, 2, "1f1b", OPTIMIZER, 3, "loss", 0),
    slow=[
        (2, 2, "1f1b", NONE, 0, "forward", 0),
        (2, 2, "interleaved-1f1b", TWO, 0, "forward", 0),
        (2, 2, "interleaved-1f1b", ONE, 3, "forward", 3),
        (2, 2, "zb-h1", TWO, 3, "weight", 3),
        (1, 3, "interleaved-1f1b", ALL, 1, "backward", 3),
    ],
    full=ANYWHERE,
)
def test_a_layer_that_fails_is_one_error_on_all_and_the_weights_are_as_without_it(
    pipeline, data, schedule, setting, bad, place, at
):
    job = Job([8] * data, planted_layers)
    ranks = on_mesh(pipeline, data, run_with_a_failure, job, schedule, setting, bad, place, at, deadline_s=DEADLINE_S)

    alone = train_alone(job, 3, adamw)
    name = f"rank {bad} (pipeline {bad % pipeline}, data {bad // pipeline})"
    for rank, (errors, losses, evaluated, _) in enumerate(ranks):
        for error, took_s in errors:
            assert error.rank == bad
            assert "ValueError: planted" in str(error)
            assert name in str(error)
            assert rank == bad or f"{name} is the culprit" in str(error)
            assert took_s < DEADLINE_S / 2
            assert rank == bad or error.waited_s < DEADLINE_S / 2
        torch.testing.assert_close(torch.stack(losses), torch.stack(alone.losses), rtol=1e-12, atol=1e-12)
        assert torch.equal(evaluated, ranks[0][2])
    assert_near(whole([rows for *_, rows in ranks], data, "weights"), alone.weights)
    trained = Job(job.rows, lambda: loaded(alone.weights))
    assert_near(whole([rows for *_, rows in ranks], data), gradients_of_steps(trained, [1]))


@settings(ONE, OPTIMIZER)
def test_a_failed_evaluation_leaves_the_next_step_right(setting):
    job = Job([8, 8], planted_layers)

    def steps(own, inputs, target):
        for layer in layers_of(own):
            layer.fails = "forward" if index_of(own) == 2 else ""
        error = error_of(own.evaluate, inputs, target=target)
        for layer in layers_of(own):
            layer.fails = ""
        assert "planted" in str(error)
        assert error.rank == 2
        own.step(inputs, target=target)

    found = gradients_after(job, "zbv", steps, deadline_s=DEADLINE_S, **setting)
    assert_near(found, gradients_of_steps(job, [1]))


@settings(TWO, OPTIMIZER)
def test_a_refused_step_keeps_the_gradients_of_earlier_ones(setting):
    job = Job([8, 8])

    def steps(own, inputs, target):
        own.step(inputs, target=target)
        few = slice(7 if own.replica else 8)
        assert type(error_of(own.step, inputs[few], target=target[few])) is ps.StepRefused
        own.step(inputs, target=target)

    found = gradients_after(job, "zbv", steps, deadline_s=DEADLINE_S, **setting)
    assert_near(found, gradients_of_steps(job, [1, 1]))


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "slow", "setting"), [(1, 1, NONE), (2, 1, TWO), (2, 2, TWO)], ids=name_of)
def test_a_slow_replica_is_named_at_the_deadline_and_a_later_step_is_right(pipeline, slow, setting):
    """The other ranks wait for a gather or a sum of its stage, or for its messages."""
    deadline_s = 1.5
    job, num_ended, have_others_ended = Job([8, 8], planted_layers), count(1), Event()

    def steps(own, inputs, target):
        own.step(inputs, target=target)
        is_slow = index_of(own) == slow
        layers_of(own)[0].pause = have_others_ended.wait if is_slow else None
        error = error_of(own.step, inputs, target=target)
        if not is_slow and next(num_ended) == 2 * pipeline - 1:
            have_others_ended.set()
        zero(own)
        have_others_ended.wait()
        return error, retried(own, inputs, target)

    options = {"pipeline": pipeline, "max_wait_s": deadline_s, "deadline_s": deadline_s} | setting
    ranks = on_pipelines(job, "interleaved-1f1b", steps, **options)

    place = f"rank {slow} (pipeline {slow % pipeline}, data {slow // pipeline})"
    expected = train_alone(job).losses[0]
    assert any(isinstance(error, DeadlineExceeded) for error, *_ in ranks)
    for rank, (error, loss) in enumerate(ranks):
        assert error.rank == slow
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-14)
        if rank != slow:
            assert f"{place} is the culprit: it has been in {slow % pipeline}F" in str(error)
            assert "in forward" in str(error)


def retried(own, inputs, target):
    """The loss of the next step; of a later one where the ranks have not come to it within one deadline."""
    for _ in range(3):
        try:
            return own.step(inputs, target=target).loss
        except ps.PipelineError:
            continue
    return None
