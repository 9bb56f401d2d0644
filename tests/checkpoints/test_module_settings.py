"""Modules that compute by other numbers than when a checkpoint was saved are refused, though their tensors fit."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.checkpoints.manifest import read_manifest
from penstock.checkpoints.module_settings import joined_settings
from penstock.checkpoints.pretrained import load_weights
from penstock.errors import CheckpointError, ConfigError, NotSaved
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.mesh_pipelines import on_mesh

WIDTH = 4


class Scaled(nn.Module):
    """A linear map with a scale, which is in no tensor."""

    def __init__(self, scale):
        super().__init__()
        self.map, self.scale = nn.Linear(WIDTH, WIDTH), scale

    def module_settings(self):
        return {"map": {"scale": self.scale}}

    def forward(self, x):
        return self.map(x) * self.scale


def used(use, where, scales=(1, 0.5), **options):
    layers = [Scaled(scale) for scale in scales]
    with ps.Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, **where, **options) as pipeline:
        return use(pipeline)


def saved(folder):
    on_ranks(2, lambda wires: used(lambda own: ps.save_checkpoint(folder, own, step=1), {"transport": wires}))


@pytest.mark.feature("X62")
def test_a_checkpoint_has_the_settings_of_modules_and_loads_into_a_model_with_the_same(tmp_path):
    saved(tmp_path)

    assert read_manifest(tmp_path / "step-1").settings == {"0.map": {"scale": 1}, "1.map": {"scale": 0.5}}
    used(lambda own: ps.load_checkpoint(tmp_path, own), {"ranks": 1}, scales=(1.0, 0.5))


@pytest.mark.parametrize("load", [ps.load_checkpoint, load_weights])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_others_is_refused_on_all_ranks_before_a_weight_changes(tmp_path, load, ranks):
    saved(tmp_path)

    def loaded(own):
        before = {name: value.clone() for name, value in own.state_dict().items()}
        error = error_of(load, tmp_path, own)
        assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
        return error

    def case(wires):
        return used(loaded, {"transport": wires} if ranks > 1 else {"ranks": 1}, scales=(1, 0.25))

    for error in on_ranks(ranks, case):
        assert type(error) is CheckpointError
        assert "'1.map' was trained with scale=0.5, but has scale=0.25 in the model. Build the model" in str(error)


def test_replicas_with_other_settings_are_refused_when_the_pipeline_is_made(tmp_path):
    def case(places):
        return error_of(used, lambda own: None, {"mesh": places}, scales=(1, 1 + places.replica))

    for error in on_mesh(2, 2, case):
        assert isinstance(error, ConfigError)
        assert "stage 1 holds other parameters or buffers" in str(error)
        assert "or the scale of an adapter" in str(error)


def test_ranks_whose_settings_came_apart_later_save_nothing():
    assert joined_settings([{"a": {"scale": 1}}, {"a": {"scale": 1.0}, "b": {}}]) == {"a": {"scale": 1}}
    error = error_of(joined_settings, [{"a": {"scale": 1}}, {"a": {"scale": 2}}])
    assert isinstance(error, NotSaved)
    assert "'a' has scale=1 on one rank and scale=2 on another" in str(error)
