"""Logs of calls find the first module whose results are not those of the unsplit model."""

import torch
from torch import nn

from penstock.verifying.calls import CallLog


def log_of(model, *inputs):
    log = CallLog()
    log.watch(model.named_modules())
    for features in inputs:
        model(features)
    return log


def net(seed=0, wrong=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    if wrong is not None:
        with torch.no_grad():
            model.get_submodule(wrong).bias.add_(1)
    return model


ONE, TWO = torch.ones(1, 2), 2 * torch.ones(1, 2)


def test_equal_results_are_found_in_any_order_and_number():
    assert log_of(net(), ONE, TWO).first_other([log_of(net(), TWO, ONE, ONE)], 1e-6) == ""


def test_the_innermost_first_module_is_named():
    assert log_of(net(), ONE).first_other([log_of(net()), log_of(net(wrong="1.0"), ONE)], 1e-6) == "1.0"
    assert log_of(net(), ONE).first_other([log_of(net(wrong="2"), ONE)], 1e-6) == "2"


def test_runs_without_values_are_no_calls():
    log = log_of(net(), torch.full((1, 2), torch.nan), ONE)

    assert len(log.results["0"]) == 1


def test_the_place_of_a_module_is_its_last_call_or_that_of_the_one_around_it():
    log = log_of(net(), ONE)

    assert log.place("0") < log.place("1.0") < log.place("1") < log.place("2")
    assert log.place("2.inner") == log.place("2")
    assert CallLog().place("0") == -1
