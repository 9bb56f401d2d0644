"""Entries of costs that take longer than the others."""

import pytest

from penstock.errors import ConfigError
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.heavy import with_heavy_entries


def test_computations_of_heavy_ranks_take_so_many_times_as_long_and_nothing_else_changes():
    costs = Costs(forward_s=(1.0,), backward_s=(1.0, 2.0, 3.0), activation_bytes=(7,), latency_s=0.1)

    heavy = with_heavy_entries(costs, {2: 2.0, 0: 1.5}, 3, "rank")

    assert heavy == Costs(forward_s=(1.5, 1.0, 2.0), backward_s=(1.5, 2.0, 6.0), activation_bytes=(7,), latency_s=0.1)


def test_costs_per_layer_have_heavy_layers():
    heavy = with_heavy_entries(LayerCosts(forward=(1.0, 2.0), backward=(3.0,)), {1: 2.0}, 2, "layer")

    assert (heavy.forward, heavy.backward, heavy.recompute) == ((1.0, 4.0), (3.0, 6.0), ())


def test_another_number_of_entries_is_refused():
    with pytest.raises(ConfigError, match=r"forward_s: 2 entries for 3 ranks; give one per rank, or one for all"):
        with_heavy_entries(Costs(forward_s=(1.0, 2.0)), {0: 2.0}, 3, "rank")
