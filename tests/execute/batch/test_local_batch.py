"""A rank's part of a batch: cut, described, and with the sizes that another rank knows."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.local_batch import BatchCutter, StepRequest, stream_of
from penstock.execute.batch.needs import InputNeeds
from penstock.execute.batch.stream import Stream
from penstock.execute.control.agreement import Mode


def cutter(*, inputs=True, **rule):
    return BatchCutter(0, "rank 0", BatchRule(**{"num_microbatches": 2} | rule), InputNeeds(inputs, False))


def test_a_first_stage_without_inputs_is_named():
    with pytest.raises(PipelineError, match=r"^rank 0 holds the first stage and was given no inputs; pass"):
        cutter().cut(StepRequest(), Mode.TRAIN)


def test_a_rank_without_a_batch_learns_the_sizes_from_another():
    batch = cutter(inputs=False).cut(StepRequest(), Mode.TRAIN)

    sized = cutter(inputs=False).with_agreed_sizes(batch, SimpleNamespace(sizes=[3, 2], lengths=()))

    assert [microbatch.size for microbatch in sized.microbatches] == [3, 2]
    assert [[part.size for part in parts] for parts in sized.slices] == [[3], [2]]


def test_a_stream_comes_alone():
    stream = Stream([])

    assert stream_of(StepRequest((stream,))) is stream
    assert stream_of(StepRequest((torch.zeros(2),))) is None
    with pytest.raises(PipelineError, match="pass it alone"):
        stream_of(StepRequest((stream,), target=torch.zeros(2)))
