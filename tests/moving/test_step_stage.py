"""One stage runs forward steps: it hands over inputs, makes a loss of what a loss function returns, keeps nothing."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PipelineError
from penstock.moving.step_stage import Place, StepCall, StepStage
from tests.local_pipelines import error_of
from tests.moving.megatron_model import Part
from tests.moving.own_layers import Wrapper

LAST = Place(stage=1, num_stages=2, part=0)


def step_returning(returned):
    def step(data_iterator, model):
        if data_iterator is not None:
            next(data_iterator)
        return model(None), lambda output: returned

    return step


def begun(returned=None, *, place=LAST, count_tokens=None, data=None, num_microbatches=1):
    stage = StepStage(Part(place.stage, place.num_stages), place, count_tokens)
    stage.begin(StepCall(step_returning(returned), [data], num_microbatches))
    return stage


def features():
    return torch.ones(1, 3, 6, dtype=torch.float64)


def test_a_stage_that_is_not_the_last_returns_its_output():
    stage = begun(place=Place(1, 3, 0))

    assert stage(features(), microbatch=0).shape == (1, 3, 6)
    assert stage.model.input_tensor is None


def test_the_last_stage_returns_the_loss_and_leaves_the_report_without_a_graph():
    loss = torch.ones((), requires_grad=True) * 2
    stage = begun((loss, {"lm loss": loss}))

    assert stage(features(), microbatch=0) is loss
    reported = stage._call.reported[0]["lm loss"]
    assert reported == 2
    assert not reported.requires_grad


def test_a_sum_is_divided_by_its_tokens_and_none_of_them_by_one():
    assert begun((torch.tensor(6.0), torch.tensor(3), {}))(features(), microbatch=0) == 2
    assert begun((torch.tensor(6.0), 3, {}))(features(), microbatch=0) == 2
    assert begun((torch.tensor(0.0), torch.tensor(0), {}))(features(), microbatch=0) == 0


def test_tokens_are_counted_ahead_on_the_last_stage_alone():
    counted = []

    def count(item):
        counted.append(item)
        return item

    last = begun((torch.tensor(6.0), 3, {}), count_tokens=count, data=iter([3, 2, 9]), num_microbatches=2)
    begun(place=Place(0, 2, 0), count_tokens=count, data=iter([3, 2]), num_microbatches=2)

    assert counted == [3, 2]
    assert [float(target) for target in last.loss_targets()] == [3, 2]
    assert last(features(), microbatch=0) == 2


def test_data_that_cannot_be_counted_are_told_by_the_forward():
    missing = begun((torch.tensor(1.0), 1, {}), count_tokens=float, data=None)
    broken = begun((torch.tensor(1.0), 1, {}), count_tokens=lambda item: 1 / 0, data=iter([1]))

    error = error_of(missing, features(), microbatch=0)
    assert isinstance(error, ConfigError)
    assert "data_iterator: is None on the last stage" in str(error)
    assert isinstance(error_of(broken, features(), microbatch=0), ZeroDivisionError)


def test_the_end_of_data_names_stage_and_microbatch():
    stage = begun((torch.tensor(1.0), {}), data=iter([1]), num_microbatches=2)
    stage(features(), microbatch=0)

    with pytest.raises(PipelineError, match="stage 1: the data ended at microbatch 1 of 2"):
        stage(features(), microbatch=1)


def test_the_input_goes_to_the_innermost_model_that_takes_it():
    part, seen = Part(1, 2), []
    part.set_input_tensor = seen.append
    part.forward = lambda features: torch.ones(())
    stage = StepStage(Wrapper(Wrapper(part)), LAST)
    stage.begin(StepCall(step_returning((torch.ones(()), {})), [None], 1))

    stage(features(), microbatch=0)

    assert torch.equal(seen[0][0], features())
    assert seen[1] == [None]


def test_a_first_part_needs_no_set_input_tensor_and_a_later_one_does():
    StepStage(nn.Linear(1, 1), Place(0, 2, 0))

    error = error_of(StepStage, nn.Linear(1, 1), LAST)

    assert isinstance(error, ConfigError)
    assert "stage 1 and has no set_input_tensor, so what stage 0 sends cannot reach it" in str(error)


def test_a_place_knows_the_ends():
    assert [Place(stage, 3, 0).is_first for stage in range(3)] == [True, False, False]
    assert [Place(stage, 3, 0).is_last for stage in range(3)] == [False, False, True]
