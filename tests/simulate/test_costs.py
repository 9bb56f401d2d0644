"""Costs: one entry counts for every stage, and a cost that cannot be is refused with its name and a way out."""

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.simulate import Costs

PER_STAGE = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
BYTES = ("message_bytes", "activation_bytes", "weight_context_bytes")
SINGLE = ("latency_s", "launch_s", "bandwidth_bytes_per_s")


def read(costs, name, num_stages):
    """Ask for the numbers that the field becomes."""
    if name in PER_STAGE:
        return costs.durations_s(num_stages)
    return costs.transfer_s(num_stages) if name == "message_bytes" else costs.bytes_per_stage(name, num_stages)


@pytest.mark.parametrize("name", [*PER_STAGE, *BYTES])
@pytest.mark.parametrize("entries", [(-1,), (1, -1), (-1, 1, 1)])
def test_a_negative_entry_is_refused_wherever_it_stands(name, entries):
    with pytest.raises(ConfigError, match=rf"{name}.*-1 is negative or not a number; costs are finite and 0 or more"):
        replace(Costs.uniform(), **{name: entries})


@pytest.mark.parametrize("name", [*PER_STAGE, *BYTES])
@pytest.mark.parametrize("entries", [(math.nan,), (1, math.nan)])
def test_an_entry_that_is_no_number_is_refused(name, entries):
    with pytest.raises(ConfigError, match=rf"{name}.*nan is negative or not a number"):
        replace(Costs.uniform(), **{name: entries})


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("value", [-0.5, math.nan])
def test_a_single_cost_that_is_negative_or_no_number_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"{name}.*{value} is negative or not a number"):
        replace(Costs.uniform(), **{name: value})


@pytest.mark.parametrize("name", [*PER_STAGE, *BYTES])
def test_an_empty_tuple_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}.*is empty; give one number per stage, or one for all"):
        replace(Costs.uniform(), **{name: ()})


@pytest.mark.parametrize("name", [*PER_STAGE, *BYTES])
@pytest.mark.parametrize(("num_entries", "num_stages"), [(2, 3), (3, 2), (2, 1)])
def test_entries_for_another_number_of_stages_are_refused(name, num_entries, num_stages):
    costs = replace(Costs.uniform(), **{name: (1,) * num_entries})

    expected = rf"{name}.*{num_entries} entries for {num_stages} stages; give one per stage, or one for all"
    with pytest.raises(ConfigError, match=expected):
        read(costs, name, num_stages)


def test_a_bandwidth_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"bandwidth.*0 bytes per second never delivers; leave it out"):
        Costs.uniform(bandwidth_bytes_per_s=0.0)


def test_costs_of_zero_are_allowed():
    costs = Costs.uniform(forward=0.0, backward_input=0.0, backward_weight=0.0, launch_s=0.0, message_bytes=(0,))

    assert (costs.durations_s(2) == 0).all()


def test_costs_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Costs.uniform().latency_s = 1.0


def test_durations_are_by_kind_and_stage():
    costs = Costs(
        forward_s=(1.0, 2.0), backward_s=(3.0, 4.0), backward_input_s=(5.0, 6.0), backward_weight_s=(7.0, 8.0)
    )

    durations_s = costs.durations_s(2)

    assert durations_s.shape == (len(Kind), 2)
    assert durations_s[Kind.FORWARD].tolist() == [1, 2]
    assert durations_s[Kind.BACKWARD].tolist() == [3, 4]
    assert durations_s[Kind.BACKWARD_INPUT].tolist() == [5, 6]
    assert durations_s[Kind.BACKWARD_WEIGHT].tolist() == [7, 8]


@pytest.mark.parametrize("num_stages", [1, 4])
def test_one_entry_counts_for_every_stage(num_stages):
    costs = Costs.uniform(forward=1.5, message_bytes=(6,), bandwidth_bytes_per_s=2.0, activation_bytes=(7,))

    assert costs.durations_s(num_stages)[Kind.FORWARD].tolist() == [1.5] * num_stages
    assert costs.transfer_s(num_stages).tolist() == [3.0] * num_stages
    assert costs.bytes_per_stage("activation_bytes", num_stages).tolist() == [7] * num_stages


def test_a_transfer_takes_bytes_over_bandwidth_without_the_latency():
    costs = Costs.uniform(message_bytes=(100, 0, 50), bandwidth_bytes_per_s=200.0, transfer=9.0)

    assert costs.transfer_s(3).tolist() == [0.5, 0.0, 0.25]


def test_without_a_bandwidth_bytes_take_no_time():
    assert Costs.uniform(message_bytes=(10**12,)).transfer_s(2).tolist() == [0.0, 0.0]


def test_bytes_are_whole_numbers_per_stage():
    costs = Costs.uniform(activation_bytes=(2**40, 3), weight_context_bytes=(5, 6))

    assert costs.bytes_per_stage("activation_bytes", 2).tolist() == [2**40, 3]
    assert costs.bytes_per_stage("weight_context_bytes", 2).tolist() == [5, 6]
    assert costs.bytes_per_stage("activation_bytes", 2).dtype == np.int64


def test_a_uniform_backward_is_the_sum_of_its_parts_unless_given():
    parts = {"forward": 1.0, "backward_input": 1.25, "backward_weight": 0.5}

    assert Costs.uniform(**parts).backward_s == (1.75,)
    assert Costs.uniform(**parts, backward=3.0).backward_s == (3.0,)
    assert Costs.uniform(**parts, backward=0.0).backward_s == (0.0,)


def test_uniform_costs_default_to_one_second_each_and_nothing_else():
    one = (1.0,)

    assert Costs.uniform() == Costs(forward_s=one, backward_input_s=one, backward_weight_s=one, backward_s=(2.0,))


def test_a_uniform_transfer_is_pure_delay():
    costs = Costs.uniform(transfer=0.25, is_exclusive=True, launch_s=0.5)

    assert (costs.latency_s, costs.bandwidth_bytes_per_s, costs.message_bytes) == (0.25, math.inf, (0,))
    assert (costs.is_exclusive, costs.launch_s) == (True, 0.5)


@pytest.mark.parametrize("value", ["1", None, [1.0], float("inf")])
def test_seconds_that_are_no_finite_number_are_refused(value):
    with pytest.raises(ConfigError, match=r"forward_s: .* is negative or not a number"):
        Costs.uniform(forward=value, backward=1.0)


def test_bytes_are_whole_and_finite():
    with pytest.raises(ConfigError, match=r"activation_bytes: 1\.5 is not a whole number of bytes"):
        Costs.uniform(activation_bytes=(1.5,))
    with pytest.raises(ConfigError, match="message_bytes: inf"):
        Costs.uniform(message_bytes=(float("inf"),))
