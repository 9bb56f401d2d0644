"""Costs: one entry counts for every stage, and a cost that cannot be is refused with its name and a fix."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.operations import IS_COMPUTE, Kind, Op
from penstock.placement import Placement
from penstock.simulation import Costs
from penstock.simulation.costs.costs import Channel

PER_STAGE = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
BESIDE = ("optimizer_s", "unshard_s", "reduce_s", "offload_s", "reload_s")
BYTES = (
    "message_bytes", "activation_bytes", "weight_context_bytes", "parameter_bytes", "gradient_bytes",
    "optimizer_bytes", "forward_workspace_bytes", "backward_workspace_bytes",
)  # fmt: skip
PER_MICROBATCH = ("microbatch_compute_factor", "microbatch_bytes_factor")
SINGLE = ("latency_s", "launch_s", "bandwidth_bytes_per_s", "overlap_factor")
TUPLES = [*PER_STAGE, *BESIDE, *BYTES, *PER_MICROBATCH, "tied_reduce_s"]


def read(costs, name, num_stages):
    """Ask for the numbers that the field becomes."""
    if name in PER_STAGE:
        return costs.durations_s(num_stages)
    if name in BESIDE:
        return costs.per_stage(name, num_stages)
    return costs.stage_bytes(Placement.line(num_stages), 1)


WRONG_ENTRIES = [(-1, 1, 1), (1, math.nan)]


@pytest.mark.parametrize(("name", "value"), [*product(TUPLES, WRONG_ENTRIES), *product(SINGLE, [-0.5, math.nan])])
def test_a_cost_that_is_negative_or_no_number_is_refused_wherever_it_stands(name, value):
    wrong = next(entry for entry in np.atleast_1d(value) if not entry >= 0)

    with pytest.raises(ConfigError, match=rf"{name}.*{wrong} is negative or not a number; costs are finite and 0 or"):
        replace(Costs.uniform(), **{name: value})


@pytest.mark.parametrize(("name", "value"), [("replicas", 0), ("replicas", 1.5), ("shards", 0.5)])
def test_a_number_of_replicas_or_shards_is_whole(name, value):
    with pytest.raises(ConfigError, match=f"{name}: {value}; expected a whole number, 1 or more"):
        replace(Costs.uniform(), **{name: value})


@pytest.mark.parametrize("name", [name for name in TUPLES if name not in PER_STAGE])
def test_an_empty_tuple_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}.*is empty; give one number for each, or one for all"):
        replace(Costs.uniform(), **{name: ()})


@pytest.mark.parametrize("name", PER_STAGE)
def test_a_kind_without_entries_is_unknown(name):
    costs = replace(Costs.uniform(), **{name: ()})

    unknown = np.isnan(costs.durations_s(3)).all(axis=1)

    # A whole backward is the sum of its parts, and a forward that runs again takes as long as the first.
    assert unknown.sum() == {"backward_s": 0, "recompute_s": 0, "forward_s": 2}.get(name, 1)
    assert costs.durations_s(3)[Kind.BACKWARD].tolist() == [2, 2, 2]
    # A whole backward is unknown where a part is.
    assert np.isnan(Costs(forward_s=(1.0,), backward_input_s=(1.0,)).durations_s(1)[Kind.BACKWARD]).all()


@pytest.mark.parametrize("name", [*PER_STAGE, *BESIDE, *BYTES])
@pytest.mark.parametrize(("num_entries", "num_stages"), [(2, 3), (2, 1)])
def test_entries_for_another_number_of_stages_are_refused(name, num_entries, num_stages):
    costs = replace(Costs.uniform(), **{name: (1,) * num_entries})

    expected = rf"{name}.*{num_entries} entries for {num_stages} stages; give one per stage, or one for all"
    with pytest.raises(ConfigError, match=expected):
        read(costs, name, num_stages)


def test_durations_are_by_kind_and_stage():
    costs = Costs(
        forward_s=(1.0, 2.0), backward_s=(3.0, 4.0), backward_input_s=(5.0, 6.0), backward_weight_s=(7.0, 8.0)
    )

    durations_s = costs.durations_s(2)

    assert durations_s.shape == (len(Op), 2)
    assert (durations_s[~IS_COMPUTE] == 0).all()
    assert durations_s[Kind.FORWARD].tolist() == [1, 2]
    assert durations_s[Kind.BACKWARD].tolist() == [3, 4]
    assert durations_s[Kind.BACKWARD_INPUT].tolist() == [5, 6]
    assert durations_s[Kind.BACKWARD_WEIGHT].tolist() == [7, 8]
    assert durations_s[Kind.RECOMPUTE].tolist() == [1, 2]
    assert replace(costs, recompute_s=(9.0,)).durations_s(2)[Kind.RECOMPUTE].tolist() == [9, 9]


def test_uniform_costs_default_to_one_second_each_a_backward_to_its_parts_and_transfers_are_pure_delay():
    one, parts = (1.0,), {"forward": 1.0, "backward_input": 1.25, "backward_weight": 0.5}

    assert Costs.uniform() == Costs(forward_s=one, backward_input_s=one, backward_weight_s=one, backward_s=(2.0,))
    assert Costs.uniform(**parts).backward_s == (1.75,)
    assert Costs.uniform(**parts, backward=3.0).backward_s == (3.0,)
    assert Costs.uniform(**parts, backward=0.0).backward_s == (0.0,)
    costs = Costs.uniform(transfer=0.25, is_exclusive=True, launch_s=0.5)
    assert (costs.latency_s, costs.bandwidth_bytes_per_s, costs.message_bytes) == (0.25, math.inf, (0,))
    assert (costs.is_exclusive, costs.launch_s) == (True, 0.5)


@pytest.mark.parametrize(
    "given",
    [
        {"activation_bytes": (2**55,)},
        {"message_bytes": (1,), "microbatch_bytes_factor": (1e300,)},
        {"parameter_bytes": (2**54,), "gradient_bytes": (2**54,)},
    ],
)
def test_bytes_whose_sum_64_bits_cannot_hold_are_refused(given):
    with pytest.raises(ConfigError, match=r"^costs: they add up to more than 72057594037927936 bytes; give fewer$"):
        Costs(**given).stage_bytes(Placement.line(4), 4)


@pytest.mark.parametrize("key", PER_MICROBATCH)
def test_factors_are_one_for_each_microbatch_or_one_for_all(key):
    assert Costs(**{key: (2.0,)}).per_microbatch(key, 3).tolist() == [2, 2, 2]
    assert Costs(**{key: (2.0, 3.0)}).per_microbatch(key, 2).tolist() == [2, 3]
    with pytest.raises(ConfigError, match=f"{key}: 2 entries for 3 microbatches; give one per microbatch, or one for"):
        Costs(**{key: (2.0, 3.0)}).per_microbatch(key, 3)


def test_a_channel_that_cannot_be_or_is_given_twice_is_refused_and_its_way_back_is_another():
    Costs(channels=(Channel(0, 1), Channel(1, 0)))

    with pytest.raises(ConfigError, match=r"channels\.bandwidth_bytes_per_s: 0 bytes per second never delivers"):
        Channel(0, 1, bandwidth_bytes_per_s=0.0)
    with pytest.raises(ConfigError, match="channels: the one from rank 0 to rank 1 is given twice; keep one"):
        Costs(channels=(Channel(0, 1), Channel(1, 0), Channel(0, 1)))


def test_errors_say_where_the_costs_come_from_and_equality_does_not_care():
    costs = Costs(forward_s=(1.0, 2.0), source="costs.toml")

    assert costs == replace(costs, source="")
    with pytest.raises(ConfigError, match=r"^forward_s: 2 entries for 3 stages; .* \(in costs\.toml\)$"):
        costs.durations_s(3)


@pytest.mark.parametrize("value", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), np.arange(1, 3), range(1, 3)])
def test_any_sequence_of_numbers_is_kept_as_a_tuple(value):
    costs = Costs(forward_s=value, message_bytes=value, channels=[Channel(0, 1)])

    assert costs == Costs(forward_s=(1.0, 2.0), message_bytes=(1, 2), channels=(Channel(0, 1),))
    assert {type(costs.forward_s), type(costs.message_bytes), type(costs.channels)} == {tuple}
    assert costs.durations_s(2)[Kind.FORWARD].tolist() == [1, 2]


@pytest.mark.parametrize("value", ["fast", {"0": 1.0}, [[1.0], [2.0]], ["1"], np.ones((2, 2)), None])
def test_what_is_no_number_nor_a_sequence_of_numbers_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"^forward_s: .* is negative or not a number; costs are finite and 0 or more"
    ):
        Costs(forward_s=value)


def test_the_bytes_of_stages_are_those_of_the_fields_and_a_checkpoint_is_what_arrives_unless_given():
    costs = Costs(
        activation_bytes=(2**40, 2), weight_context_bytes=(3,), message_bytes=(4, 5), parameter_bytes=(6,),
        gradient_bytes=(7, 8), optimizer_bytes=(9,), microbatch_bytes_factor=(1.0, 0.5, 1.0),
        forward_workspace_bytes=10, backward_workspace_bytes=(11, 12),
    )  # fmt: skip

    sizes = costs.stage_bytes(Placement.line(2), 3)

    found = (sizes.activation.tolist(), sizes.weight_context.tolist(), sizes.message.tolist())
    assert found == ([2**40, 2], [3, 3], [4, 5])
    assert sizes.activation.dtype == np.int64
    assert sizes.checkpoint.tolist() == [0, 4]
    assert sizes.static.tolist() == [22, 23]
    assert (sizes.forward_workspace.tolist(), sizes.backward_workspace.tolist()) == ([10, 10], [11, 12])
    assert sizes.microbatch_factor.tolist() == [1, 0.5, 1]
    assert sizes.not_given == ()
    given = replace(costs, checkpoint_bytes=(10, 20)).stage_bytes(Placement.line(2), 3)
    assert given.checkpoint.tolist() == [10, 20]


def test_bytes_that_are_not_given_are_named():
    sizes = Costs(activation_bytes=(1,)).stage_bytes(Placement.line(2), 1)

    assert sizes.microbatch_factor is None
    assert sorted(sizes.not_given) == sorted({*BYTES, "checkpoint_bytes"} - {"activation_bytes"})


def test_a_share_of_a_microbatch_has_its_share_of_seconds_and_bytes_but_all_parameters():
    share = Costs.uniform(recompute=3.0, activation_bytes=5, message_bytes=8, parameter_bytes=10).of_share(0.5)

    assert (share.forward_s, share.recompute_s) == ((0.5,), (1.5,))
    assert (share.activation_bytes, share.message_bytes, share.parameter_bytes) == ((2,), (4,), (10,))
