"""Bounds of layouts, against sums by hand."""

import pytest

import penstock as ps
from penstock.searching.layouts.bounds import bound_of
from penstock.searching.layouts.cluster import Cluster
from penstock.searching.layouts.layout import Layout
from penstock.searching.layouts.problem import LayoutProblem


def problem(shard="none", pipeline=2, data=1, **costs):
    layout = Layout(pipeline=pipeline, data=data, shard=shard, microbatch_size=1, microbatches=4, checkpointing="none")
    fields = {"forward": [1, 1, 1], "backward_input": [1, 1, 1], "backward_weight": [1, 1, 1]} | costs
    return LayoutProblem.of(layout, ps.LayerCosts(**fields), Cluster(gpus=pipeline * data, memory_bytes=1 << 40))


def test_work_counts_what_later_ranks_wait_for_their_first_microbatch():
    bound = bound_of(problem())

    assert (bound.name, bound.seconds) == ("work", pytest.approx((4 * 9 + 1) / 2))


def test_the_update_is_work_that_shards_share_out():
    assert bound_of(problem(optimizer=[2, 2, 2])).seconds == pytest.approx((4 * 9 + 1 + 6) / 2)
    assert bound_of(problem("optimizer", data=2, optimizer=[2, 2, 2])).seconds == pytest.approx((4 * 9 + 1 + 3) / 2)


def test_a_heavy_layer_takes_its_work_behind_the_layers_before_it():
    bound = bound_of(problem(forward=[1, 1, 9]))

    assert (bound.name, bound.seconds) == ("one layer", pytest.approx(2 + 4 * 11))


def test_bytes_are_those_of_the_mean_rank_or_of_one_layer():
    sizes = {"parameter_bytes": [10, 10, 20], "gradient_bytes": [10, 10, 20], "optimizer_bytes": [40, 40, 80]}

    assert bound_of(problem(**sizes)).least_bytes == 120
    assert bound_of(problem(**sizes, activation_bytes=[0, 0, 100])).least_bytes == 220
    assert bound_of(problem("full", data=2, **sizes)).least_bytes == 60 + 20 + 20
    assert bound_of(problem("optimizer", data=2, **sizes)).least_bytes == 100
