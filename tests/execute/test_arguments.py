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
    require_schedule,
    require_split,
    take_process_group,
)
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.local_pipelines import error_of


def compute(features):
    return features


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


NO_LAYERS = {
    "numbers": ([1, 2], "layers: layer 0 is 1 of type int. Give a module, or a callable"),
    "one module": (nn.Linear(2, 2), "layers: one module, a Linear; give an nn.Sequential or a list of layers"),
    "a text": ("ab", "layers: 'ab' of type str; give an nn.Sequential or a list"),
    "by name": ({"a": nn.Tanh()}, "or a list of layers"),
    "module dict": (
        nn.ModuleDict({"a": nn.Tanh()}),
        "a ModuleDict; give an nn.Sequential or a list",
    ),
    "torch's function": (
        [nn.Tanh(), torch.tanh],
        "layers: layer 1 is the function tanh, which cannot be called without",
    ),
    "own function": (
        [compute],
        "layers: layer 0 is the function compute, which cannot be called without features. Give",
    ),
    "class": ([nn.Linear], "layer 0 is the class Linear, which cannot be called without in_features, out_features"),
    "nothing": (None, "layers: None; give an nn.Sequential or a list"),
}


@pytest.mark.parametrize("case", NO_LAYERS)
def test_what_is_no_list_of_layers_is_refused(case):
    layers, message = NO_LAYERS[case]

    refused(message, "layers", layer_list, layers)


def test_a_schedule_is_a_name_a_file_or_a_schedule():
    for schedule in ("1f1b", Path("mine.csv"), ps.build("1f1b", ranks=2, microbatches=2)):
        require_schedule(schedule)

    refused(
        "schedule: 4 of type int; expected a name, a Schedule, a Program, or the path", "schedule", require_schedule, 4
    )
    refused("penstock.build(function, ranks=..., microbatches=...)", "schedule", require_schedule, build_rows)


def test_a_split_is_a_list_of_whole_numbers():
    for split in (None, [1, 2], (1, 2), torch.Size([1, 2])):
        require_split(split)

    refused("split: 3 of type int; give a list, the number of layers per stage", "split", require_split, 3)
    refused("split: '12' of type str; give a list", "split", require_split, "12")
    refused("split: 1.5 of type float is no number of layers", "split", require_split, [2, 1.5])


def test_a_loss_is_a_function_or_a_module():
    for loss in (None, compute, nn.MSELoss()):
        require_loss(loss)

    refused("loss: 'mse' of type str; give a function of the output and the target", "loss", require_loss, "mse")
    refused("loss: the class MSELoss is given; give one of it, loss=MSELoss()", "loss", require_loss, nn.MSELoss)


@pytest.mark.parametrize("seconds", [-1, 0, float("nan"), float("inf"), "60", None, True])
def test_a_time_is_a_number_of_seconds(seconds):
    assert is_time(0.5)
    assert not is_time(seconds)


@pytest.mark.parametrize("value", [0, 1.0, "1", True, None])
def test_a_whole_number_has_a_smallest(value):
    assert is_whole_number(1, 1)
    assert not is_whole_number(value, 1)


def test_a_device_is_one_that_torch_knows():
    for device in (None, "cpu", torch.device("cpu")):
        require_device(device)

    refused(
        "device: 'gpu' of type str is no device of torch: Expected one of cpu, cuda", "device", require_device, "gpu"
    )


def test_a_device_is_one_that_this_process_has():
    refused("device: there is no device 'cuda:99': this ", "device", require_device, "cuda:99")


def test_an_option_says_what_was_expected():
    require("run_ahead", 1, True, "a number")

    refused("run_ahead: 0 of type int; expected a number", "run_ahead", require, "run_ahead", 0, False, "a number")


def test_a_function_is_described_alike_whichever_it_is():
    assert describe_function(compute) == describe_function(nn.MSELoss()) == "a function"
    assert describe_function(None) == "none"


def test_a_number_as_group_is_an_option_of_a_family_that_knows_one():
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    for process_group in (None, group):
        options = {}

        assert take_process_group(process_group, 2, options, ["group"]) is process_group
        assert options == {"group": 2}


def test_what_is_no_process_group_is_refused_where_the_family_has_no_such_option():
    for group, known in ((2, []), (2, ["slices"]), ("gloo", ["group"]), (True, ["group"]), (2.0, ["group"])):
        refused("expected a process group of torch.distributed", "group", take_process_group, None, group, {}, known)
        refused("expected a process group", "process_group", take_process_group, group, None, {}, known)


def test_a_process_group_is_taken_by_either_name_and_not_by_both():
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)

    assert take_process_group(None, None, {}) is None
    assert take_process_group(group, None, {}, ["group"]) is group
    assert take_process_group(None, group, {}, ["group"]) is group
    refused("two process groups are given", "process_group", take_process_group, group, group, {}, ["group"])


MISTAKES = {
    "layers": {"layers": [1, 2]},
    "split": {"split": 3},
    "schedule": {"schedule": build_rows},
    "loss": {"loss": "mse"},
    "deadline_s": {"deadline_s": -1},
    "process_group": {"process_group": "gloo"},
    "group": {"group": 2},
    "group, of": {"group": 2, "schedule": ps.build("interleaved-1f1b", ranks=1, microbatches=2)},
}


@pytest.mark.feature("0.2")
@pytest.mark.parametrize("key", MISTAKES)
def test_a_pipeline_refuses_each_by_its_name(key):
    given = {"layers": [nn.Linear(2, 2)], "schedule": "1f1b", "microbatches": 2} | MISTAKES[key]

    error = error_of(Pipeline, given.pop("layers"), **given)

    assert isinstance(error, ConfigError)
    assert error.key == key.partition(",")[0]


def refused(message, key, call, *args):
    error = error_of(call, *args)
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert error.key == key
