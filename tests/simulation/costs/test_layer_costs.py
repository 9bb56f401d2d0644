"""Costs per layer become costs per stage for any split; layers share what their stage costs, and add up to it again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import Channel

LAYERS = LayerCosts(
    forward=[1.0, 2.0, 3.0, 4.0],
    backward=2.0,
    optimizer=[0.5],
    message_bytes=[10, 20, 30, 40],
    activation_bytes=(5, 6, 7, 8),
    parameter_bytes=np.array([100, 100, 100, 101]),
    launch_s=0.25,
    channels=(Channel(0, 1, 2.0),),
    microbatch_compute_factor=(1.0, 2.0),
    source="layers.toml",
)
PARTS = (range(2), range(2, 5))


COPIES = [range(3), range(3, 4), range(3), range(3, 4)]
RECOMPUTED = LayerCosts(forward=[1.0] * 3, checkpoint_bytes=[0, 4, 8])
WORKING = LayerCosts(forward=1.0, forward_workspace_bytes=[1, 9, 2, 3], backward_workspace_bytes=[4, 0, 8, 7])
NO_CONTEXTS = LayerCosts(activation_bytes=[9, 9], weight_context_bytes=0)


@pytest.mark.parametrize(
    ("layers", "split", "expected"),
    [
        (LAYERS, [1, 3], {"forward_s": (1, 9), "backward_s": (2, 6), "optimizer_s": (0.5, 1.5)}),
        (LAYERS, np.array([1, 3]), {"forward_s": (1, 9), "activation_bytes": (5, 21), "parameter_bytes": (100, 301)}),
        (LAYERS, [1, 3], {"message_bytes": (10, 40)}),
        (LAYERS, [2, 1, 1], {"message_bytes": (20, 30, 40)}),
        (LAYERS, COPIES, {"forward_s": (6, 4, 6, 4), "message_bytes": (30, 40, 30, 40)}),
        (RECOMPUTED, [2, 1], {"checkpoint_bytes": (0, 8)}),
        (LAYERS, [2, 2], {"checkpoint_bytes": (), "backward_input_s": (), "source": "layers.toml"}),
        (LAYERS, [2, 2], {"launch_s": 0.25, "channels": LAYERS.channels, "microbatch_compute_factor": (1.0, 2.0)}),
        (LAYERS, [2, 2], {"weight_context_bytes": (11, 15), "gradient_bytes": (0, 0), "optimizer_bytes": (0, 0)}),
        (NO_CONTEXTS, [2], {"weight_context_bytes": (0,)}),
        (WORKING, [2, 2], {"forward_workspace_bytes": (9, 3), "backward_workspace_bytes": (4, 8)}),
        (LAYERS, [2, 2], {"forward_workspace_bytes": (0, 0), "backward_workspace_bytes": (0, 0)}),
    ],
)
def test_a_stage_costs_what_its_layers_cost_together_and_what_belongs_to_no_layer_stays(layers, split, expected):
    """It sends what its last layer makes, and keeps the inputs of its first one to recompute; contexts are activations.

    Its layers run one after another, so it has the largest of their workspaces.
    Stages of two copies name their layers.
    """
    stages = layers.of_stages(split)

    assert {name: getattr(stages, name) for name in expected} == expected
    assert stages == layers.of_stages(list(split))


def test_the_number_of_layers_is_that_of_the_longest_list_or_of_a_split():
    assert LAYERS.num_layers == 4
    assert LayerCosts(forward=1.0, split=[3, 4]).num_layers == 7
    assert LayerCosts(forward=1.0, split=[1]).num_layers == 1
    with pytest.raises(ConfigError, match="forward: one number for all layers does not say how many there are; give"):
        _ = LayerCosts(forward=1.0).num_layers


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ([1, 2], r"forward: 4 entries for 3 layers; give one per layer, or one for all \(in layers\.toml\)"),
        ([4, 0], r"split: \[4, 0\]; give every stage a layer or more"),
        ([], r"split: \[\]; give every stage a layer or more"),
        ([range(2), range(3, 4)], r"split: \[.*\]; no stage has layer 2, give every layer to one"),
        (2, r"split: 2 of type int; expected layers per stage, such as \[3, 2\]"),
        ("22", "split: '22' of type str; expected layers per stage"),
        ([[2, 3], [0, 1]], "split: .* of type list; expected layers per stage"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, told):
    with pytest.raises(ConfigError, match=told):
        LAYERS.of_stages(split)


def test_costs_of_stages_remember_their_split():
    costs = Costs.uniform(forward=4.0)

    assert LayerCosts.from_stages(costs, [range(3), range(3, 4)], [1.0] * 4).split == (3, 1)
    assert LayerCosts.from_stages(costs, [range(1), range(1, 4)] * 2, [1.0] * 4).split == (1, 3)


def test_seconds_of_a_layer_are_those_of_its_forward_and_its_backward():
    layers = LayerCosts(forward=[1.0, 2.0], backward_input=[3.0, 4.0], backward_weight=1.0)

    assert layers.seconds_of_layers.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert LayerCosts(activation_bytes=[3, 4]).seconds_of_layers.tolist() == [[0.0, 0.0], [0.0, 0.0]]


NO_LAYERS = "; expected layers per stage, 1 or more each, such as [3, 2]"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"forward": [-1.0]}, "forward: "),
        ({"activation_bytes": [1.5]}, "activation_bytes: "),
        ({"split": [3, 4]}, "split: [3, 4] adds up to 7 layers, but the costs have 4; make it add up to 4, or leave"),
        ({"split": [4, 0]}, f"split: [4, 0]{NO_LAYERS}"),
        ({"split": [2.5, 1.5]}, f"split: [2.5, 1.5]{NO_LAYERS}"),
    ],
)
def test_what_is_no_cost_or_a_split_of_other_layers_is_refused_with_its_key(given, told):
    with pytest.raises(ConfigError) as caught:
        LayerCosts(**{"forward": [1.0, 2.0, 3.0, 4.0]} | given)
    assert str(caught.value).startswith(told)


@given(st.data())
def test_the_same_layers_cost_the_same_at_any_split(data):
    """The work of all ranks does not depend on the cuts."""
    num_layers = data.draw(st.integers(1, 8))
    lists = st.lists(st.integers(0, 99), min_size=num_layers, max_size=num_layers)
    layers = LayerCosts(forward=data.draw(lists), backward=data.draw(lists), activation_bytes=data.draw(lists))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_layers - 1)))) if num_layers > 1 else []
    split = np.diff([0, *cuts, num_layers]).tolist()

    stages = layers.of_stages(split)

    assert sum(stages.forward_s) == sum(layers.forward)
    assert sum(stages.per_stage("activation_bytes", len(split))) == sum(layers.activation_bytes)


@pytest.mark.parametrize(
    ("forward_s", "parts", "weights", "forward"),
    [
        ((4.0, 6.0), PARTS, (1, 3, 1, 1, 4), (1.0, 3.0, 1.0, 1.0, 4.0)),
        ((4.0, 6.0), PARTS, (0, 0, 1, 1, 0), (2.0, 2.0, 3.0, 3.0, 0.0)),
        ((1.0, 2.0, 3.0, 6.0), (range(1), range(1, 2)) * 2, (1, 1), (2.0, 4.0)),
    ],
    ids=["by weight", "equally without weight", "two copies of a layer give their mean"],
)
def test_layers_share_what_their_stage_costs(forward_s, parts, weights, forward):
    per_layer = LayerCosts.from_stages(Costs(forward_s=forward_s), parts, weights)

    assert per_layer.forward == forward
    assert per_layer.backward == ()


def test_a_layer_sends_what_its_stage_sends_and_those_of_a_last_stage_what_it_receives():
    per_layer = LayerCosts.from_stages(Costs(forward_s=(1.0,), message_bytes=(8, 0)), PARTS, (1,) * 5)

    assert per_layer.message_bytes == (8,) * 5
    assert per_layer.of_stages((range(1), range(1, 5))).message_bytes == (8, 8)


def test_bytes_of_stages_are_not_taken_for_those_of_layers():
    costs = Costs(forward_s=(1.0,), activation_bytes=(7,), parameter_bytes=(8,), optimizer_bytes=(9,), reduce_s=(1.0,))

    per_layer = LayerCosts.from_stages(costs, PARTS, (1,) * 5)

    assert (per_layer.activation_bytes, per_layer.parameter_bytes, per_layer.optimizer_bytes) == ((0,), (0,), (0,))
    assert per_layer.reduce == ()


@given(st.data())
def test_the_same_split_costs_the_same_again(data):
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    parts = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
    seconds = st.tuples(*[st.floats(0, 9)] * len(parts))
    costs = Costs(forward_s=data.draw(seconds), backward_s=data.draw(seconds), launch_s=0.5, channels=(Channel(0, 1),))
    weights = data.draw(st.lists(st.floats(0, 3), min_size=ends[-1], max_size=ends[-1]))

    found = LayerCosts.from_stages(costs, parts, weights).of_stages(counts)

    assert found.forward_s == pytest.approx(costs.forward_s)
    assert found.backward_s == pytest.approx(costs.backward_s)
    assert (found.launch_s, found.channels) == (costs.launch_s, costs.channels)
