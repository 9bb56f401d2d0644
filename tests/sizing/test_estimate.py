"""Costs of a model that nobody has run: its own sizes, with the seconds of a data sheet."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.simulation.costs import devices
from penstock.sizing.layer_work import layer_work
from tests.sizing.models import LENGTH, plain_layers, small_layers

SIZES = {"sequence_length": LENGTH, "data_type": "bfloat16"}


def test_costs_have_the_sizes_of_the_layers_and_the_seconds_of_a_device():
    layers = small_layers()
    works = layer_work(layers, **SIZES)

    costs = ps.estimate(layers, device="h100-sxm", **SIZES)

    for field in ("activation_bytes", "weight_context_bytes", "message_bytes", "parameter_bytes", "gradient_bytes"):
        assert list(getattr(costs, field)) == [getattr(work, field) for work in works]
    assert list(costs.optimizer_bytes) == [8 * work.trainable_parameters for work in works]
    assert all(seconds > 0 for seconds in costs.forward)


def test_a_faster_device_takes_less_and_full_checkpointing_more():
    layers = small_layers()

    fast, slow = (ps.estimate(layers, device=name, **SIZES) for name in ("h100-sxm", "a100-sxm-40gb"))
    again = ps.estimate(layers, device="h100-sxm", activation_checkpointing="full", **SIZES)

    assert sum(fast.backward_input) < sum(slow.backward_input)
    assert sum(again.backward_input) > sum(fast.backward_input)


def test_costs_can_be_searched():
    plan = ps.search(ps.estimate(small_layers(), device="h100-sxm", **SIZES), 2, 4, seconds=0.2)

    assert plan.makespan_s > 0


def test_a_device_and_a_link_may_be_described():
    device, link = devices.device("h100-sxm"), devices.link("nvlink-3")

    costs = ps.estimate(small_layers(), device=device, link=link, **SIZES)

    assert costs.bandwidth_bytes_per_s == link.reached_bytes_per_s


class Decomposed(nn.Module):
    def forward(self, hidden):
        return torch.linalg.qr(hidden)[0]


@pytest.mark.parametrize(
    ("layers", "options", "words"),
    [
        (plain_layers(), {"device": "h100"}, "there is no device 'h100'.*h100-sxm"),
        (plain_layers(), {"device": 3}, "device: 3 of type int; expected a name"),
        (plain_layers(), {"device": "h100-sxm", "link": "tokenring"}, "there is no link 'tokenring'"),
        ([nn.Embedding(9, 8), Decomposed()], {"device": "h100-sxm", "data_type": None}, "linalg_qr"),
    ],
)
def test_what_cannot_be_estimated_is_refused(layers, options, words):
    with pytest.raises(ConfigError, match=words):
        ps.estimate(layers, **SIZES | options)
