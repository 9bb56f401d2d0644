"""One stage runs forward steps: it hands over inputs, makes a loss of what a loss function returns, keeps nothing."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PipelineError
from penstock.moving.step_stage import RoutePlace, StepCall, StepLoss, StepStage
from tests.moving.megatron_model import Part
from tests.moving.own_layers import Wrapper
from tests.support.local_pipelines import error_of

LAST = RoutePlace(stage=1, num_stages=2, part=0)


def step_returning(returned):
    def step(data_iterator, model):
        if data_iterator is not None:
            next(data_iterator)
        return model(None), lambda output: returned

    return step


def begun(returned=None, *, place=LAST, count_tokens=None, data=None, num_microbatches=1):
    stage = StepStage(Part(place.stage, place.num_stages), place, count_tokens, step_loss=StepLoss())
    stage.begin(StepCall(step_returning(returned), [data], num_microbatches))
    return stage


def features():
    return torch.ones(1, 3, 6, dtype=torch.float64)


def test_a_stage_that_ended_its_call_left_no_loss_behind():
    stage = begun((torch.ones(()), {}))
    stage(features(), microbatch=0)

    stage.end()

    assert stage._step_loss._next is None


def test_a_forward_outside_of_a_call_says_what_to_call():
    stage = begun((torch.ones(()), {}))
    stage.end()

    error = error_of(stage, features(), microbatch=0)

    assert isinstance(error, PipelineError)
    assert "stage 1: no forward step is given outside of a call of forward_backward_func" in str(error)


def test_data_that_cannot_be_counted_are_told_by_the_forward():
    missing = begun((torch.tensor(1.0), 1, {}), count_tokens=float, data=None)
    broken = begun((torch.tensor(1.0), 1, {}), count_tokens=lambda item: 1 / 0, data=iter([1]))

    error = error_of(missing, features(), microbatch=0)
    assert isinstance(error, ConfigError)
    assert "data_iterator: is None on the last stage" in str(error)
    assert isinstance(error_of(broken, features(), microbatch=0), ZeroDivisionError)


@pytest.mark.parametrize(
    ("returned", "found"), [(torch.ones(1), "a Tensor"), ((1, 2, 3), "3 values"), ((1, 2), "2 values")]
)
def test_a_forward_step_that_returns_no_pair_is_told(returned, found):
    stage = StepStage(Part(0, 2), RoutePlace(0, 2, 0), step_loss=StepLoss())
    stage.begin(StepCall(lambda data_iterator, model: returned, [None], 1))

    with pytest.raises(PipelineError, match=rf"forward_step_func returned {found}; expected the pair"):
        stage(microbatch=0)


def test_a_step_that_wants_data_where_there_are_none_is_told_so_and_other_errors_stay():
    def step(data_iterator, model):
        return next(data_iterator), None

    wanting = StepStage(Part(1, 2), LAST, step_loss=StepLoss())
    wanting.begin(StepCall(step, [None], 1))
    failing = begun((torch.ones(()), {}), data=iter([1]))
    failing.model.forward = len

    with pytest.raises(PipelineError, match=r"stage 1: the forward step failed .* and data_iterator is None on this"):
        wanting(features(), microbatch=0)
    assert isinstance(error_of(failing, features(), microbatch=0), TypeError)


@pytest.mark.feature("F9")
def test_the_input_goes_to_the_innermost_model_that_takes_it():
    part, seen = Part(1, 2), []
    part.set_input_tensor = seen.append
    part.forward = lambda features: torch.ones(())
    stage = StepStage(Wrapper(Wrapper(part)), LAST, step_loss=StepLoss())
    stage.begin(StepCall(step_returning((torch.ones(()), {})), [None], 1))

    stage(features(), microbatch=0)

    assert torch.equal(seen[0][0], features())
    assert seen[1] == [None]


def test_a_first_part_needs_no_set_input_tensor_and_a_later_one_does():
    StepStage(nn.Linear(1, 1), RoutePlace(0, 2, 0), step_loss=StepLoss())

    error = error_of(StepStage, nn.Linear(1, 1), LAST, step_loss=StepLoss())

    assert isinstance(error, ConfigError)
    assert "stage 1 and has no set_input_tensor, so what stage 0 sends cannot reach it" in str(error)
