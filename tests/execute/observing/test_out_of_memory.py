"""A step that ran out of memory says what its rank held, and which options hold less."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import PipelineError
from tests.support.local_pipelines import Around, block, error_of, float_task, on_pipelines


class Full(Around):
    """A layer for which there is no memory in its third call."""

    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == 3:
            raise self.error_type("no memory left (made up)")
        return self.inner(x)


@pytest.mark.parametrize("error_type", [torch.OutOfMemoryError, MemoryError])
def test_the_rank_that_ran_out_says_what_it_held_and_the_others_name_it(error_type):
    def layers():
        full = Full(1)
        full.error_type = error_type
        return [block(0), full, block(2), block(3)]

    task = replace(float_task(8), make_layers=layers)

    full, other = on_pipelines(2, task, lambda own: error_of(own.step, *task.inputs, target=task.target), "gpipe")

    assert isinstance(full, PipelineError)
    assert "rank 0, 0F2, in layer 1 (Full): " in str(full)
    assert "this rank held 432 B of parameters, 0 B of gradients; 2 forwards waited for a backward" in str(full)
    assert "recompute=True keeps the inputs of stages alone" in str(full)
    assert "rank 0 is the culprit" in str(other)
    assert "no memory left (made up)" in str(other)
