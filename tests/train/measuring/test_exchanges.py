"""Channels, gathers and reductions are measured by themselves: nothing of a step is in them."""

import pytest
import torch

from penstock.execute.transport.protocol import Tag
from penstock.models import cross_entropy_loss
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.file import costs_from_toml
from penstock.simulation.costs.replicas import of_replicas
from penstock.simulation.costs.writing import costs_to_toml
from penstock.train.measuring.exchanges import (
    NUM_ROUNDS,
    NUM_TRIPS,
    NUM_WARM_UP_ROUNDS,
    SMALL_BYTES,
    Exchanges,
    channels_of,
    measure_channels,
    measure_exchanges,
)
from penstock.train.profiling import profile_pipeline
from tests.support.local_pipelines import on_ranks
from tests.support.mesh_pipelines import Job, on_mesh, pipeline_of
from tests.support.rank_clocks import RankClocks, clocked
from tests.train.local_ranks import small_layers
from tests.train.test_profiling import dataset

WIRE_S = 0.03
JOB = Job([8, 8])
FOUR_STAGES = {"schedule": "interleaved-1f1b", "stages_per_rank": 2}
CPU = torch.device("cpu")
LARGE_BYTES = 1 << 20
CHANNEL_S = 0.02


@pytest.fixture
def clocks(monkeypatch):
    """Clocks by which exchanges are measured, and on which nothing but the wires takes time."""
    clocks = RankClocks()
    monkeypatch.setattr("penstock.train.measuring.exchanges.time", clocks)
    return clocks


def measure(places, shard, prepare=lambda pipeline: None, **options):
    with pipeline_of(places, JOB, **(FOUR_STAGES | options), shard=shard) as pipeline:
        prepare(pipeline)
        found = measure_exchanges(pipeline)
        return found, [each.grad for each in pipeline.parameters()]


@pytest.mark.parametrize("shard", ["none", "optimizer", "full"])
def test_all_ranks_learn_what_each_stage_takes(shard):
    results = on_mesh(2, 2, measure, shard)

    found = results[0][0]
    assert all(other == found for other, _ in results)
    assert (found.replicas, found.shards) == (2, 1 if shard == "none" else 2)
    assert len(found.unshard_s) == len(found.reduce_s) == 4
    assert all((seconds > 0) is (found.shards > 1) for seconds in found.unshard_s)
    assert min(*found.reduce_s, found.replica_latency_s, found.replica_bandwidth_bytes_per_s) > 0
    assert all(gradient is None for _, gradients in results for gradient in gradients)
    assert on_mesh(1, 1, measure, shard)[0][0] is None, "one replica has nothing to measure"


def test_a_step_behind_it_is_that_of_a_pipeline_that_was_not_measured():
    def case(places, is_measured):
        with pipeline_of(places, JOB, "1f1b", shard="full") as pipeline:
            inputs, target = JOB.of(pipeline.replica)
            pipeline.step(inputs, target=target)
            for each in pipeline.parameters():
                each.grad = None
            if is_measured:
                measure_exchanges(pipeline)
            loss = pipeline.step(inputs, target=target).loss
            return loss, [each.grad.to_local() for each in pipeline.parameters()]

    for (loss, gradients), (expected, others) in zip(
        *(on_mesh(2, 2, case, each) for each in (True, False)), strict=True
    ):
        assert torch.equal(loss, expected)
        assert all(map(torch.equal, gradients, others))


@pytest.mark.parametrize(("shard", "gathers", "ways"), [("none", 0, 2), ("full", 1, 1)])
def test_seconds_are_those_of_the_way_between_replicas(clocks, shard, gathers, ways):
    """A message takes a while. A sum has two, one after the other."""

    connect = clocked(clocks, lambda *ends, num_bytes: WIRE_S)
    found = on_mesh(1, 2, lambda places: measure(places, shard), connect=connect)[0][0]

    assert found.replica_latency_s == pytest.approx(WIRE_S)
    assert found.unshard_s == pytest.approx((gathers * WIRE_S,) * 2)
    assert found.reduce_s == pytest.approx((ways * WIRE_S,) * 2)


@pytest.mark.feature("H11")
def test_a_replica_that_comes_late_does_not_make_exchanges_longer(clocks):
    def late(pipeline):
        for unit in pipeline.units if pipeline.replica == 1 else ():
            begin = unit.layout.begin_step

            def begin_late(begin=begin, **options):
                clocks.sleep(WIRE_S)
                begin(**options)

            unit.layout.begin_step = begin_late

    def case(places):
        return measure(places, "full", late)[0], clocks.monotonic()

    found, took_s = on_mesh(1, 2, case, connect=clocked(clocks))[0]

    assert took_s >= 2 * (NUM_WARM_UP_ROUNDS + NUM_ROUNDS) * WIRE_S
    assert found.unshard_s == found.reduce_s == (0.0, 0.0)


def exchanges(**options):
    both = {"unshard_s": (3.0, 6.0), "reduce_s": (8.0, 5.0)}
    link = {"replica_latency_s": 0.5, "replica_bandwidth_bytes_per_s": 100.0}
    return Exchanges(**({"replicas": 2, "shards": 2} | both | link | options))


def test_costs_of_other_numbers_of_replicas_follow():
    sizes = Costs.uniform(parameter_bytes=(400, 800), gradient_bytes=(400, 800))

    costs = exchanges().added_to(sizes)

    assert (costs.unshard_s, costs.reduce_s, costs.replicas, costs.shards) == ((3.0, 6.0), (8.0, 5.0), 2, 2)
    # An exchange between two takes 2.5 and 4.5 on this link, between four 3.5 and 6.5.
    assert of_replicas(costs, 4, is_sharded=True).unshard_s == pytest.approx((3.0 * 3.5 / 2.5, 6.0 * 6.5 / 4.5))
    assert exchanges(shards=1).added_to(sizes).shards == 1


def test_layers_share_what_their_stage_takes_by_their_bytes():
    costs = LayerCosts(forward=(1.0,) * 3, parameter_bytes=(100, 300, 50), gradient_bytes=(0, 0, 50), split=(2, 1))

    found = exchanges().shared_out(costs, [range(2), range(2, 3)])
    twice = exchanges(unshard_s=(3.0, 6.0, 5.0, 6.0), reduce_s=(8.0, 5.0) * 2).shared_out(
        costs, [range(2), range(2, 3)] * 2
    )

    assert (found.unshard, found.reduce) == ((0.75, 2.25, 6.0), (4.0, 4.0, 5.0))
    assert twice.unshard == (1.0, 3.0, 6.0)


@pytest.mark.feature("H11")
@pytest.mark.slow
def test_a_profile_of_replicas_writes_what_their_exchanges_take():
    def case(places, shard):
        with Pipeline(small_layers(), "1f1b", 4, cross_entropy_loss, mesh=places, shard=shard) as pipeline:
            return profile_pipeline(pipeline, dataset(), 1)

    whole, sharded = (on_mesh(2, 2, case, shard)[0] for shard in ("none", "full"))

    costs, layers = sharded.costs, costs_from_toml(costs_to_toml(sharded.layer_costs))
    assert (costs.unshard_s, costs.reduce_s) == (sharded.exchanges.unshard_s, sharded.exchanges.reduce_s)
    assert (layers.replicas, layers.shards, whole.costs.replicas, whole.costs.shards) == (2, 2, 2, 1)
    of_stages = layers.of_stages([3, 4])
    assert of_stages.unshard_s == pytest.approx(costs.unshard_s)
    assert of_stages.reduce_s == pytest.approx(costs.reduce_s)
    assert of_stages.replica_latency_s == sharded.exchanges.replica_latency_s
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(costs, name) == getattr(whole.costs, name)


def test_channels_are_the_ways_of_outputs_and_gradients_between_ranks():
    assert channels_of(Placement.line(3)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert channels_of(Placement.vee(2)) == [(0, 1), (1, 0)]
    assert channels_of(Placement.loop(3, 6)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert channels_of(Placement.line(1)) == []


def test_bandwidth_is_what_a_large_message_takes_longer_than_a_small_one(clocks):
    def case(wires):
        return measure_channels(wires, [(0, 1)], LARGE_BYTES, CPU)

    slow_for_large = clocked(clocks, lambda *ends, num_bytes: CHANNEL_S if num_bytes > SMALL_BYTES else 0.0)
    [speed], [same] = on_ranks(2, case, connect=slow_for_large)

    assert speed == same
    assert (speed.sender, speed.receiver) == (0, 1)
    assert speed.bandwidth_bytes_per_s == pytest.approx((LARGE_BYTES - SMALL_BYTES) / CHANNEL_S)
    assert speed.latency_s == 0.0


def test_every_channel_is_measured_once_and_known_to_all_ranks():
    channels = [(0, 1), (1, 0), (2, 0)]
    num_sent = []

    def case(wires):
        post_send = wires.post_send

        def counted(peer, tensor, tag=Tag.DATA):
            num_sent.extend([(wires.rank, peer)] if tag is Tag.DATA else [])
            return post_send(peer, tensor, tag)

        wires.post_send = counted
        return measure_channels(wires, channels, LARGE_BYTES, CPU)

    found = on_ranks(3, case)

    assert found[0] == found[1] == found[2]
    assert [(speed.sender, speed.receiver) for speed in found[0]] == channels
    assert all(speed.latency_s > 0 for speed in found[0])
    assert num_sent.count((2, 0)) == 2 * NUM_TRIPS
