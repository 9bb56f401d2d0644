"""Bounds of layouts, against sums by hand."""

import pytest

import penstock as ps
from penstock.searching.layouts.bounds import bound_of
from penstock.searching.layouts.cluster import Cluster
from penstock.searching.layouts.layout import Layout
from penstock.searching.layouts.problem import LayoutProblem


def problem(shard="none", pipeline=2, data=1, limit_bytes=1 << 40, **costs):
    layout = Layout(pipeline=pipeline, data=data, shard=shard, microbatch_size=1, microbatches=4, checkpointing="none")
    fields = {"forward": [1, 1, 1], "backward_input": [1, 1, 1], "backward_weight": [1, 1, 1]} | costs
    return LayoutProblem.of(layout, ps.LayerCosts(**fields), Cluster(gpus=pipeline * data, memory_bytes=limit_bytes))


def test_whole_layers_do_not_divide_evenly_over_ranks():
    """Of three equal layers, some rank has two: 4 x 6 s; or the second rank waits 1 s for its first microbatch."""
    bound = bound_of(problem())

    assert bound.seconds == pytest.approx(24, rel=1e-6)
    assert bound.name == "whole layers"


def test_the_update_is_work_that_shards_share_out():
    plain, none, sharded = (
        bound_of(problem(**fields)).seconds
        for fields in ({}, {"optimizer": [2, 2, 2]}, {"shard": "optimizer", "data": 2, "optimizer": [2, 2, 2]})
    )

    assert none == pytest.approx(plain + 4, rel=1e-6)
    assert sharded == pytest.approx(plain + 2, rel=1e-6)


def test_a_heavy_layer_takes_its_work_behind_the_layers_before_it():
    assert bound_of(problem(forward=[1, 1, 9])).seconds >= 2 + 4 * 11


def test_costs_of_whole_backwards_alone_are_bounded_too():
    whole = problem(backward=[2, 2, 2], backward_input=(), backward_weight=())

    assert bound_of(whole).seconds == pytest.approx(24, rel=1e-6)


def test_memory_that_forces_stages_to_run_again_takes_time():
    equal = dict.fromkeys(("forward", "backward_input", "backward_weight"), [1] * 4)
    roomy, tight = (
        bound_of(problem(pipeline=4, activation_bytes=[1 << 20] * 4, limit_bytes=limit_bytes, **equal))
        for limit_bytes in (4 << 20, 1 << 20)
    )

    assert tight.seconds > roomy.seconds
    assert tight.name == "memory of all ranks"


def test_bytes_are_those_of_the_mean_rank_or_of_one_layer():
    sizes = {"parameter_bytes": [10, 10, 20], "gradient_bytes": [10, 10, 20], "optimizer_bytes": [40, 40, 80]}

    assert bound_of(problem(**sizes)).least_bytes == 120
    assert bound_of(problem(**sizes, activation_bytes=[0, 0, 100])).least_bytes == 220
    assert bound_of(problem("full", data=2, **sizes)).least_bytes == 60 + 20 + 20
    assert bound_of(problem("optimizer", data=2, **sizes)).least_bytes == 100
    assert bound_of(problem(**sizes, backward_workspace_bytes=[0, 0, 70])).least_bytes == 190
