"""A step starts empty and does not share what it collects with another step."""

import torch

from penstock.execute.loss import LossShares
from penstock.execute.microbatch import split_batch
from penstock.execute.step import Step


def test_two_steps_collect_apart():
    microbatches = split_batch((torch.arange(4),), {}, None, num_microbatches=2)
    slices, shares = [[microbatch] for microbatch in microbatches], LossShares([0.5, 0.5], [[1.0], [1.0]])
    first, second = (Step(slices, shares, None, keeps_outputs=False) for _ in range(2))

    first.losses[0, 0] = torch.tensor(1.0)
    first.outputs[0, 0] = torch.tensor(2.0)

    assert second.losses == {}
    assert second.outputs == {}
    assert [microbatch.size for (microbatch,) in second.slices] == [2, 2]
    assert second.num_slices == 1
