"""Numbers of microbatches: of a step, or of a stream for each step."""

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, EndOfData, PipelineError
from penstock.execute.batch.step_numbers import MAX_MICROBATCHES, StreamNumbers, required_number, whole_number

NO_NUMBERS = [0, -1, True, 2.0, "2", None, MAX_MICROBATCHES + 1]
IN_ARRAYS = [np.array([2]), np.array(2.0), torch.tensor([2]), torch.tensor(2.0)]


@pytest.mark.parametrize("value", [*NO_NUMBERS, *IN_ARRAYS])
def test_what_is_no_number_of_microbatches_is_refused_with_its_value(value):
    assert whole_number(value) is None
    with pytest.raises(PipelineError, match=r"m is .* expected a whole number from 1 to 1,000,000"):
        required_number(value, "m")


@pytest.mark.parametrize("value", [np.int64(3), np.int32(3), np.array(3), torch.tensor(3)])
def test_numbers_of_numpy_and_torch_are_numbers(value):
    assert required_number(value, "m") == 3
    assert type(whole_number(value)) is int


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_stream_takes_a_number_for_each_step_from_arrays_and_tensors(make):
    each, one = StreamNumbers(make([4, 2])), StreamNumbers(make([4]))

    assert [numbers.next(None, is_again=False) for numbers in (each, each, one)] == [4, 2, 4]
    with pytest.raises(EndOfData):
        one.next(None, is_again=False)


def test_a_stream_has_one_number_for_all_steps_or_one_for_each():
    once, each, none = StreamNumbers(3), StreamNumbers([2, np.int64(1)]), StreamNumbers(None)

    assert [numbers.next(None, is_again=False) for numbers in (once, once, each, each, none)] == [3, 3, 2, 1, None]
    assert none.next(5, is_again=False) == 5
    for _ in range(2):
        with pytest.raises(EndOfData, match="microbatches= have all been used"):
            each.next(None, is_again=False)


def test_a_refused_step_leaves_its_number():
    numbers = StreamNumbers([2, 1])

    assert [numbers.next(None, is_again=is_again) for is_again in (True, True, False, True)] == [2, 2, 1, 1]


@pytest.mark.parametrize("numbers", [0, 2.5, True, np.array(2.5), torch.tensor(2.5)])
def test_a_stream_takes_a_number_or_numbers(numbers):
    with pytest.raises(ConfigError, match="or an iterable of such numbers") as error:
        StreamNumbers(numbers)
    assert error.value.key == "microbatches"


def test_what_a_stream_gives_is_a_number_and_the_only_one():
    with pytest.raises(PipelineError, match="a number that a stream was given as microbatches= is 0 of type int"):
        StreamNumbers([0]).next(None, is_again=False)
    with pytest.raises(PipelineError, match="microbatches is 2, but the stream says itself how many it brings"):
        StreamNumbers([3]).next(2, is_again=False)
