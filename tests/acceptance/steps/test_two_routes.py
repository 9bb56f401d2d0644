"""Two copies of a model that run in opposite directions train like one model."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoints.weight_files import save_weights
from penstock.execute.control.collectives import Control
from penstock.execute.stages.gradient_norm import clip_gradients
from penstock.pipeline import Pipeline
from penstock.train.optimizing.optim import build_optimizer
from penstock.train.settings.sections import OptimizerSection
from tests.support.local_pipelines import (
    difference,
    float_task,
    named,
    on_ranks,
    step_task,
    token_task,
    two_routes,
    two_steps,
)
from tests.support.reference import reference_step

FLOAT64 = torch.float64
NEARLY = {"rtol": 1e-12, "atol": 1e-12}


def pipeline_of(wires, task, num_microbatches=4, **options):
    schedule = two_routes(wires.num_ranks, num_microbatches)
    return Pipeline(task.make_layers(), schedule, loss=task.loss, transport=wires, **task.options, **options)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 5), (3, 1), (4, 5)])
def test_every_rank_ends_a_step_with_the_whole_gradient_of_its_stages(num_ranks, num_microbatches):
    task = token_task(2 * num_microbatches + 1, FLOAT64)

    found = on_ranks(num_ranks, lambda wires: step_task(pipeline_of(wires, task, num_microbatches), task))

    assert difference(found, task.reference(num_microbatches), tolerance=1e-12) == []
    for other, outcome in enumerate(reversed(found)):
        assert outcome.gradients.keys() == found[other].gradients.keys()
        assert all(torch.equal(g, found[other].gradients[name]) for name, g in outcome.gradients.items())


def test_gradients_of_several_steps_add_up():
    task = float_task(8, FLOAT64)

    found = on_ranks(3, lambda wires: two_steps(pipeline_of(wires, task), task))

    assert difference(found, task.reference(4, num_steps=2), tolerance=1e-12) == []


# ---- training


OPTIMIZER = OptimizerSection(learning_rate=0.05, clip_norm=0.2)


def tied_layers():
    layers = token_task(1, FLOAT64).make_layers()
    layers[-1].weight = layers[0].weight
    return layers


def learn(parameters, step, all_gather, skip=()):
    """Three optimizer steps, clipped; returns the gradient norms."""
    optimizer = build_optimizer(parameters, OPTIMIZER)
    norms = []
    for _ in range(3):
        step()
        gradients = [(name, parameter.grad) for name, parameter in parameters]
        norms.append(clip_gradients(gradients, all_gather, OPTIMIZER.clip_norm, skip=skip))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_training_with_clipping_and_a_tied_head_is_that_of_one_process(num_ranks, tmp_path):
    task = token_task(9, FLOAT64)
    layers = tied_layers()

    def case(wires):
        pipeline = Pipeline(tied_layers(), two_routes(num_ranks, 4), loss=task.loss, transport=wires, **task.options)
        parameters = list(pipeline.named_parameters())
        step = partial(pipeline.step, *task.inputs, target=task.target)
        norms = learn(parameters, step, Control(wires).all_gather_object, pipeline.copied_names)
        save_weights(tmp_path, pipeline)
        return norms, dict(parameters)

    found = on_ranks(num_ranks, case)

    alone = partial(
        reference_step, layers, task.inputs, {}, task.target, loss=task.loss, num_microbatches=4, **task.options
    )
    expected_norms = learn(named(layers), alone, lambda value: [value])
    expected = dict(named(layers))
    for norms, parameters in found:
        assert norms == found[0][0]
        assert norms == pytest.approx(expected_norms, abs=1e-12)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], **NEARLY)
    (_, first), *_, (_, last) = found
    assert all(torch.equal(parameter, last[name]) for name, parameter in first.items())
    saved = load_file(tmp_path / "weights.safetensors")
    assert saved.keys() == expected.keys() - {"4.weight"}
    assert all(torch.equal(saved[name], parameter) for name, parameter in first.items() if name in saved)


# ---- what goes in and comes out


def test_outputs_go_to_the_rank_of_the_first_routes_last_stage_if_that_rank_asks():
    task = float_task(8, FLOAT64)
    whole = torch.cat(task.reference(4)[0].outputs)

    def case(wires):
        pipeline = pipeline_of(wires, task)
        wishes = [wires.rank == rank for rank in range(3)]
        return [pipeline.evaluate(*task.inputs, target=task.target, return_outputs=wish).outputs for wish in wishes]

    first, middle, last = on_ranks(3, case)

    assert first == middle == [None] * 3
    assert last[:2] == [None] * 2
    torch.testing.assert_close(last[2], whole, **NEARLY)


def test_the_hook_is_called_once_for_copies_on_one_rank_and_on_every_rank_else():
    task = float_task(8, FLOAT64)

    def case(wires):
        called = []
        step_task(pipeline_of(wires, task, reduce_stage=called.append), task)
        return called

    assert on_ranks(3, case) == [[0, 5], [4], [2, 3]]


def test_the_split_shows_the_copies():
    task = float_task(8, FLOAT64)

    drawn = on_ranks(2, lambda wires: pipeline_of(wires, task).describe_split())

    assert drawn[0] == drawn[1]
    assert "0 and 2       3   60.0%" in drawn[0]
