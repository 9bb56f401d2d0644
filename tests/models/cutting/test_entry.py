"""An argument that the first stage alone is given is the batch's there, and has its shape elsewhere."""

import torch
from torch import nn

from penstock.models.cutting.entry import PartCall


class Run:
    def batch_leaf(self, name, tensor):
        return name, tensor.shape


def test_a_run_decides_what_an_argument_of_the_first_stage_is():
    tokens = torch.ones(2, 3)
    assert PartCall((tokens,), {}, True).batch_leaf("tokens", tokens) is tokens
    assert PartCall((tokens,), {}, True, run=Run()).batch_leaf("tokens", tokens) == ("tokens", (2, 3))


def test_the_device_is_that_of_the_modules_else_of_the_inputs():
    call = PartCall((), {"mask": torch.ones(2, device="meta")}, True)
    assert call.device({"a": nn.Linear(2, 2)}).type == "cpu"
    assert call.device({}).type == "meta"
    assert PartCall((), {}, True).device({}).type == "cpu"
