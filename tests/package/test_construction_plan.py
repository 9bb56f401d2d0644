"""What a rank decides by itself: which layers it builds, how they are sharded, and what it refuses before it builds."""

import gc

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.lost_device import living_instances
from penstock.execute.transport.places import Places
from penstock.execute.undocumented_backends import mesh_without_groups
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, error_of, float_layers, on_ranks, square_loss, values
from tests.support.mesh_pipelines import on_mesh


def shard(places, layers, **options):
    return Pipeline(layers, "interleaved-1f1b", 4, square_loss, mesh=places, shard="full", **options)


def test_shards_need_a_mesh_with_replicas_on_the_device_of_the_stages():
    (error,) = on_ranks(1, lambda wires: error_of(Pipeline, [nn.Linear(2, 2)], transport=wires, shard="full"))
    assert isinstance(error, ConfigError)
    assert "'full' needs the ranks to share with" in str(error)

    def elsewhere(places):
        mesh = mesh_without_groups("data", 2, places.replica, "meta")
        return error_of(shard, Places(places.pipeline, places.data, places.names, mesh), float_layers())

    for error in on_mesh(1, 2, elsewhere):
        assert "it is of devices of kind 'meta', but the stages are on 'cpu'" in str(error)


@pytest.mark.feature("F2")
@pytest.mark.parametrize(
    ("schedule", "layers_per_stage", "num_stages"),
    [("1f1b", 4, 2), ("interleaved-1f1b", 2, 4), ("zbv", 2, 4), ("dualpipe", 4, 4), ("dualpipe", 7, 4)],
)
def test_stages_follow_from_the_layers_of_each(schedule, layers_per_stage, num_stages):
    """The two copies of a model under `dualpipe` have two stages each."""

    def case(wires):
        options = {"transport": wires, "layers_per_stage": layers_per_stage}
        return Pipeline(float_layers(num_layers=8), schedule, 4, square_loss, **options).schedule.num_stages

    assert on_ranks(2, case) == [num_stages, num_stages]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layers_per_stage": 3}, "3 layers per stage make 3 stages of 8 layers, no multiple of 2 ranks; use 2 or 4"),
        ({"layers_per_stage": 4, "stages_per_rank": 1}, "goes without stages_per_rank"),
        ({"layers_per_stage": 4, "split": [4, 4]}, "goes without split"),
        ({"layers_per_stage": 0}, "1 or more layers"),
    ],
)
def test_layers_per_stage_that_make_no_schedule_are_refused(options, told):
    for error in on_ranks(2, lambda wires: error_of(Pipeline, float_layers(num_layers=8), transport=wires, **options)):
        assert type(error) is ConfigError
        assert error.key == "layers_per_stage"
        assert told in str(error)


def test_a_split_goes_without_weights():
    for error in on_ranks(
        2, lambda wires: error_of(Pipeline, float_layers(), transport=wires, split=[2, 3], weights=[1] * 5)
    ):
        assert type(error) is ConfigError
        assert "weights: split says already which stage gets how many layers; pass one of the two" in str(error)


def test_layers_are_built_when_all_replicas_are_known_to_be_set_up_alike():
    built = []

    def build(places):
        def layer():
            built.append(places.index)
            return nn.Linear(WIDTH, WIDTH)

        return error_of(shard, places, [layer] * 4, seed=places.replica)

    errors = on_mesh(2, 2, build)

    assert built == []
    assert all("seed" in str(error) for error in errors)


WIDE = 256


def whole_bytes():
    """Bytes of the storages of all matrices of this width that are alive."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in living_instances(torch.Tensor)
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dim() == 2 and tensor.shape[1] == WIDE
    }
    return sum(storages.values())


def test_a_rank_holds_its_shards_and_one_whole_layer_while_it_builds():
    peaks = []

    def build(places):
        def layer():
            peaks.append(whole_bytes())
            return nn.Linear(WIDE, WIDE)

        with shard(places, [layer] * 8) as pipeline:
            return {name: tuple(each.shape) for name, each in pipeline.named_parameters()}

    (own,) = on_mesh(1, 1, lambda places: build(places))
    assert len(own) == 16
    peaks.clear()
    gc.collect()
    before = whole_bytes()
    on_mesh(1, 2, build)
    layer_bytes = 4 * WIDE * WIDE
    # 2 replicas in this process: all shards, which are one model, and what each is building.
    assert max(peaks) - before <= 8 * layer_bytes + 2 * layer_bytes
    assert max(peaks) - before < 2 * 7 * layer_bytes


@pytest.mark.parametrize("kind", ["modules", "builders", "tied builders"])
def test_however_layers_are_given_all_replicas_train_the_first_ones_values(kind):
    def case(places):
        torch.manual_seed(places.replica)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        if kind != "modules":
            layers = [lambda layer=layer: layer for layer in layers]
        if kind == "builders":
            layers = [lambda: nn.Linear(WIDTH, WIDTH)] * 4
        tied = [("0.weight", "2.weight")] if kind == "tied builders" else []
        with shard(places, layers, residency=1, tied=tied) as pipeline:
            state = pipeline.state_dict(on_rank=0)
            result = pipeline.evaluate(values(1, 8, WIDTH), target=values(2, 8, WIDTH))
            return state, result.loss.item()

    (state, loss), (_, other) = on_mesh(1, 2, case)

    assert loss == other
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for index, layer in enumerate(layers):
        layer.load_state_dict({name: state[f"{index}.{name}"] for name in ("weight", "bias")})
    with torch.no_grad():
        expected = square_loss(nn.Sequential(*layers)(values(1, 8, WIDTH)), values(2, 8, WIDTH))
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert torch.equal(layers[0].weight, layers[2].weight) is (kind == "tied builders")


@pytest.mark.parametrize(
    ("num_replicas", "build_on", "told"),
    [
        (3, lambda replica: 1 / 0 if replica == 2 else nn.Tanh(), "layer '1' cannot be built: ZeroDivisionError"),
        (2, lambda replica: nn.Linear(WIDTH, WIDTH + replica), "holds other parameters or buffers on"),
    ],
    ids=["one cannot be built", "one differs"],
)
def test_layers_that_replicas_do_not_build_alike_are_told_on_all_at_once(num_replicas, build_on, told):
    def case(places):
        layers = [lambda: nn.Linear(WIDTH, WIDTH), lambda: build_on(places.replica), nn.Tanh, nn.Tanh]
        return error_of(shard, places, layers)

    assert all(told in str(error) for error in on_mesh(1, num_replicas, case))
