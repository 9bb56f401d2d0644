"""The outputs of a step are put together by rule, over slices and then over microbatches."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import Stack, Sum
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.outputs import merged_outputs
from penstock.execute.step import Step


def outputs_of(*slices):
    step = Step([], StepLosses(2, len(slices)))
    step.outputs.update({(b, q): output for b in range(2) for q, output in enumerate(slices)})
    return step


def test_outputs_are_joined_along_the_sequence_and_then_along_the_samples():
    merged = merged_outputs(outputs_of(torch.zeros(3, 2, 5), torch.ones(3, 1, 5)), None, None, 1)

    assert merged.shape == (6, 3, 5)
    assert merged[:, :, 0].tolist() == [[0.0, 0.0, 1.0]] * 6
    numbers = outputs_of(torch.tensor([1.0]), torch.tensor([2.0]))
    assert merged_outputs(numbers, Stack(), Sum(), 1).tolist() == [[3.0], [3.0]]  # by the rules of the caller


def test_outputs_without_a_sequence_get_a_dimension_of_slices():
    step = outputs_of(
        {"rows": torch.zeros(3), "n": 1, "one": torch.tensor(0.0)},
        {"rows": torch.ones(3), "n": 2, "one": torch.tensor(1.0)},
    )

    merged = merged_outputs(step, None, None, 1)

    assert merged["rows"].tolist() == [[0.0, 1.0]] * 6
    assert merged["one"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert merged["n"] == [[1, 1], [2, 2]]  # a list over slices of lists over microbatches


def test_outputs_of_slices_that_differ_in_form_are_an_error():
    with pytest.raises(PipelineError, match="the output of slice 1 has the form"):
        merged_outputs(outputs_of(torch.zeros(1, 1), (torch.zeros(1, 1),)), None, None, 1)
