"""A skip hands a value past the layers between, on one device as in parts."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.models import Skip, connect_skips


class Down(nn.Module):
    """The first example of `Skip`."""

    def __init__(self, skip=None):
        super().__init__()
        self.skip = skip or Skip("features")

    def forward(self, features):
        self.skip.put(features)
        return features.relu()


class Up(nn.Module):
    """The second example of `Skip`."""

    def __init__(self, skip=None):
        super().__init__()
        self.skip = skip or Skip("features")

    def forward(self, features):
        return features + self.skip.get()


def test_on_one_device_layers_with_the_same_skip_find_each_other():
    skip, features = Skip("features"), torch.randn(2, 3)

    model = nn.Sequential(Down(skip), Up(skip))

    for _ in range(2):
        assert torch.equal(model(features), features.relu() + features)
        features = torch.randn(2, 3)


def test_on_one_device_connected_skips_of_one_name_find_each_other():
    layers, features = [Down(), nn.Sequential(nn.Tanh(), Up()), Up()], torch.randn(2, 3)

    connect_skips(layers)

    assert torch.equal(nn.Sequential(*layers)(features), features.relu().tanh() + features + features)


def test_a_skip_that_nothing_was_put_into_says_how_to_find_it():
    model = nn.Sequential(Down(), Up())

    with pytest.raises(PenstockError, match=r"skip 'features' is got before .* call connect_skips\(layers\) once"):
        model(torch.randn(2, 3))


def test_a_skip_adds_nothing_to_what_a_model_saves():
    assert list(nn.Sequential(Down(), Up()).state_dict()) == []
    assert "(skip): Skip('features')" in repr(Down())


def test_a_skip_has_a_name():
    with pytest.raises(ConfigError, match="a Skip has no name"):
        Skip("")


def test_whoever_runs_the_layers_gives_the_shelf():
    skip, buffer = Skip("features"), Mock(**{"get.return_value": "value"})

    skip.begin_skips(buffer)
    skip.put(3)
    found = skip.get()
    skip.end_skips()

    assert found == "value"
    assert buffer.method_calls == [call.put("features", 3), call.get("features")]
    with pytest.raises(PenstockError):
        skip.get()


def test_threads_that_run_one_and_the_same_skip_have_shelves_of_their_own():
    skip, both_began = Skip("features"), threading.Barrier(2)

    def run(value):
        skip.begin_skips(Mock(**{"get.return_value": value}))
        both_began.wait(10)
        found = skip.get()
        both_began.wait(10)
        skip.end_skips()
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, ("one", "other"))) == ["one", "other"]


def test_the_thread_of_a_recomputation_finds_the_shelf_of_the_one_that_waits_for_it():
    skip = Skip("features")
    skip.begin_skips(Mock(**{"get.return_value": "value"}))

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(skip.get).result() == "value"


def test_a_model_can_be_copied_after_a_forward_and_its_copy_has_a_value_of_its_own():
    skip = Skip("features")
    model = nn.Sequential(nn.Linear(2, 2), Down(skip), Up(skip))
    features = torch.ones(1, 2)
    model(features)

    other = copy.deepcopy(model)

    assert other[1].skip is other[2].skip
    with pytest.raises(PenstockError, match="before anything was put"):
        other[2](features)
    assert torch.equal(other(features), model(features))
