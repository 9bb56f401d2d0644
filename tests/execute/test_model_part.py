"""What a rank holds of the model, seen as torch shows a model: names, mode, norm of the gradients."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PipelineError
from tests.execute.stages.test_model_state import pipeline_of, tied_layers
from tests.support.local_pipelines import (
    WIDTH,
    assert_errors,
    block,
    error_of,
    float_layers,
    named,
    on_ranks,
    square_loss,
    two_routes,
    values,
)

BATCH = values(1, 8, WIDTH), values(2, 8, WIDTH)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_of_all_modules_of_the_layers_is_that_of_torch(is_training):
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()), nn.Dropout()]

    def case(wires):
        pipeline = pipeline_of(wires, layers)
        pipeline.train(not is_training)
        assert (pipeline.train() if is_training else pipeline.eval()) is pipeline

    on_ranks(1, case)

    assert [module.training for layer in layers for module in layer.modules()] == [is_training] * 4


def test_a_container_of_torch_gives_its_layers_their_names():
    def make():
        first, second = block(0), block(1)
        return nn.Sequential(OrderedDict(embed=first, middle=second, again=second, head=block(2)))

    def case(wires):
        return [name for name, _ in pipeline_of(wires, make()).named_parameters()]

    names = [name for part in on_ranks(2, case) for name in part]

    assert {name.split(".")[0] for name in names} == {"embed", "middle", "again", "head"}
    for container in (nn.Sequential(*float_layers()), nn.ModuleList(float_layers())):
        found = on_ranks(1, lambda wires, given=container: list(pipeline_of(wires, given).state_dict()))
        assert found == [list(container.state_dict())]


@pytest.mark.feature("X42")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("main_gradients", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "two routes"])
def test_clipping_is_that_of_torch_over_the_unsplit_model(schedule, main_gradients, norm_type):
    attribute = "main_grad" if main_gradients else "grad"

    def case(wires):
        chosen = two_routes(2, 4) if schedule == "two routes" else schedule
        pipeline = pipeline_of(wires, tied_layers(0), chosen, main_gradients=main_gradients)
        pipeline.step(BATCH[0], target=BATCH[1])
        norm = pipeline.clip_grad_norm_(0.01, norm_type)
        return norm, {name: getattr(parameter, attribute).clone() for name, parameter in pipeline.named_parameters()}

    layers = tied_layers(0)
    found = on_ranks(2, case)

    square_loss(nn.Sequential(*layers)(BATCH[0]), BATCH[1]).backward()
    parameters = dict(named(layers))
    expected = nn.utils.clip_grad_norm_(
        list({id(each): each for each in parameters.values()}.values()), 0.01, norm_type
    )
    for norm, gradients in found:
        assert norm.dtype == torch.float64
        assert norm.shape == ()
        torch.testing.assert_close(norm, expected.double(), rtol=1e-5, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-5, atol=1e-8)
    assert found[0][0] == found[1][0]


def test_a_norm_that_is_not_finite_is_an_error_if_it_is_to_be_one_and_scales_nothing_then():
    def case(wires):
        pipeline = pipeline_of(wires, float_layers())
        pipeline.step(BATCH[0], target=BATCH[1])
        gradients = [parameter.grad for parameter in pipeline.parameters()]
        if wires.rank == 0:
            gradients[0].view(-1)[0] = math.inf
        before = [gradient.clone() for gradient in gradients]
        error = error_of(pipeline.clip_grad_norm_, 1.0, error_if_nonfinite=True)
        is_unscaled = all(map(torch.equal, gradients, before))
        norm = pipeline.clip_grad_norm_(1.0)
        return error, is_unscaled, norm.item(), torch.cat([gradient.flatten() for gradient in gradients])

    for rank, (error, is_unscaled, norm, scaled) in enumerate(on_ranks(2, case)):
        assert_errors([error], PipelineError, "the norm of the gradients is inf")
        assert is_unscaled
        assert norm == math.inf
        assert scaled.isnan().sum() == (rank == 0)
        assert not scaled.nan_to_num().any()


def test_limits_and_norms_that_are_no_numbers_are_refused():
    (pipeline,) = on_ranks(1, lambda wires: pipeline_of(wires, float_layers()))

    for pair in [(0, 2), (-1.0, 2), ("1", 2), (1.0, 0), (math.nan, 2)]:
        error = error_of(pipeline.clip_grad_norm_, *pair)
        assert_errors([error], ConfigError, "expected a number larger than 0, or infinity")


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda pipeline, rank: pipeline.clip_grad_norm_(1.0 + rank), "disagree on max_norm"),
        (lambda pipeline, rank: pipeline.clip_grad_norm_(1.0 - rank), "expected a number larger than 0"),
        (lambda pipeline, rank: pipeline.state_dict(on_rank=rank), "disagree on on_rank"),
        (lambda pipeline, rank: pipeline.load_state_dict({}, from_rank=2 * rank), "expected a rank from 0 to 1"),
    ],
)
def test_an_argument_that_is_wrong_or_another_on_one_rank_is_refused_on_all(act, told):
    def case(wires):
        return error_of(act, pipeline_of(wires, float_layers()), wires.rank)

    for error in on_ranks(2, case):
        assert told in str(error)
