"""What Pipeline cannot work with is refused by its name, with the fix."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.execute.arguments import (
    describe_function,
    is_time,
    is_whole_number,
    layer_list,
    require,
    require_device,
    require_loss,
    require_process_group,
    require_schedule,
    require_split,
)
from penstock.models import LayerSpec
from tests.support.local_pipelines import error_of


def compute(features):
    return features


class Nested(nn.Module):
    """Has a short list of like blocks, a long one of them, and a longer chain of unlike ones."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())


class PreTrainedModel(Nested):
    """Named as the base class of transformers is."""


def build_rows(ranks, microbatches):
    return []


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(2, 2), nn.Tanh],
        (partial(nn.Linear, 2, 2), lambda: nn.Tanh()),
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
        nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]),
        [LayerSpec("first", nn.Tanh), nn.Tanh()],
    ],
    ids=["list", "tuple", "sequential", "module list", "specs"],
)
def test_modules_and_what_builds_one_are_layers(layers):
    assert len(layer_list(layers)) == 2


ACCEPTED = [
    *[(require_schedule, each) for each in ("1f1b", Path("mine.csv"), ps.build("1f1b", ranks=2, microbatches=2))],
    *[(require_split, split) for split in (None, [1, 2], (1, 2), torch.Size([1, 2]))],
    *[(require_loss, loss) for loss in (None, compute, nn.MSELoss())],
    *[(require_device, device) for device in (None, "cpu", torch.device("cpu"))],
]


@pytest.mark.parametrize(("call", "given"), ACCEPTED)
def test_what_is_right_passes(call, given):
    call(given)


REFUSED = {
    layer_list: [
        ([1, 2], "layers: layer 0 is 1 of type int. Give a module, or a callable"),
        (
            Nested(),
            "layers: one module, a Nested; pass ps.cut(model, ['body.blocks.*']), which cuts it at its 3 blocks, "
            "body.blocks.0 to body.blocks.2; or give an nn.Sequential or a list",
        ),
        (
            PreTrainedModel(),
            "pass ps.from_transformers(model), if it is a causal language model, or ps.cut(model, ['body.blocks.*'])",
        ),
        (nn.Linear(2, 2), "layers: one module, a Linear; give an nn.Sequential or a list of layers"),
        ("ab", "layers: 'ab' of type str; give an nn.Sequential or a list"),
        ({"a": nn.Tanh()}, "or a list of layers"),
        (nn.ModuleDict({"a": nn.Tanh()}), "a ModuleDict; give an nn.Sequential or a list"),
        ([nn.Tanh(), torch.tanh], "layers: layer 1 is the function tanh, which cannot be called without"),
        ([compute], "layers: layer 0 is the function compute, which cannot be called without features. Give"),
        ([nn.Linear], "layer 0 is the class Linear, which cannot be called without in_features, out_features"),
        (None, "layers: None; give an nn.Sequential or a list"),
    ],
    require_schedule: [
        (4, "schedule: 4 of type int; expected a name, a Schedule, a Program, or the path"),
        (build_rows, "penstock.build(function, ranks=..., microbatches=...)"),
    ],
    require_split: [
        (3, "split: 3 of type int; give a list, the number of layers per stage"),
        ("12", "split: '12' of type str; give a list"),
        ([2, 1.5], "split: 1.5 of type float is no number of layers"),
    ],
    require_loss: [
        ("mse", "loss: 'mse' of type str; give a function of the output and the target"),
        (nn.MSELoss, "loss: the class MSELoss is given; give one of it, loss=MSELoss()"),
    ],
    require_device: [
        ("gpu", "device: 'gpu' of type str is no device of torch: Expected one of cpu, cuda"),
        ("cuda:99", "device: there is no device 'cuda:99': this "),
    ],
}


@pytest.mark.parametrize(
    ("call", "given", "message"), [(call, *case) for call, cases in REFUSED.items() for case in cases]
)
def test_what_is_wrong_is_refused_by_its_name_with_the_fix(call, given, message):
    key = "layers" if call is layer_list else call.__name__.removeprefix("require_")

    refused(message, key, call, given)


def test_times_whole_numbers_and_functions_are_told_from_other_values():
    times, numbers = [-1, 0, float("nan"), float("inf"), "60", None, True], [0, 1.0, "1", True, None]

    assert [is_time(value) for value in (0.5, *times)] == [True] + [False] * len(times)
    assert [is_whole_number(value, 1) for value in (1, *numbers)] == [True] + [False] * len(numbers)
    assert [describe_function(value) for value in (compute, nn.MSELoss(), None)] == ["a function"] * 2 + ["none"]
    require("run_ahead", 1, True, "a number")
    refused("run_ahead: 0 of type int; expected a number", "run_ahead", require, "run_ahead", 0, False, "a number")


def test_only_a_process_group_is_taken_for_one():
    require_process_group(None)
    require_process_group(dist.ProcessGroup(dist.HashStore(), 0, 1))

    for value in (2, "gloo", True):
        refused("expected a process group of torch.distributed", "process_group", require_process_group, value)


def refused(message, key, call, *args):
    error = error_of(call, *args)
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert error.key == key
