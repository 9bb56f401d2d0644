"""Ranks have layers in memory of their own, with the names of the unsplit model."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.execute.batch.stream import Part
from penstock.verifying.observation import EVALUATION, GRADIENT, OUTPUT, TRAINING
from penstock.verifying.parts import PartsRun, RankLayers, copied, is_points, layers_of_rank
from penstock.verifying.whole_model import Objective
from tests.support.verified_models import BLOCKS, Plain

CPU = torch.device("cpu")


def test_points_make_layers_of_a_copy():
    model = Plain()

    own = layers_of_rank(model, BLOCKS)

    assert [layer.layer_name for layer in own.layers][:2] == ["embedding", "blocks.0"]
    assert set(own.parameter_names.values()) == {name for name, _ in model.named_parameters()}
    assert not {id(parameter) for parameter in model.parameters()} & own.parameter_names.keys()


def test_modules_are_copied_together_with_the_model_and_recipes_are_used():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spec = ps.LayerSpec("0", lambda: nn.Linear(2, 2))

    own = layers_of_rank(model, list(model))

    assert own.module_names[id(own.layers[1])] == "1"
    assert own.layers[1] is not model[1]
    assert layers_of_rank(model, [spec]).layers == [spec]


def test_points_are_texts():
    assert is_points(["a.*"])
    assert is_points("a.*")
    assert not is_points([nn.Tanh()])


def test_what_cannot_be_copied_is_refused():
    model = nn.Linear(2, 2)
    model.result = model(torch.ones(1, 2))

    with pytest.raises(ConfigError, match="cannot be copied"):
        copied(model)


def test_each_rank_observes_its_part():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = {name: name for name, _ in model.named_parameters()}
    run = PartsRun(
        lambda: layers_of_rank(model, list(model)), "1f1b", Objective(nn.functional.mse_loss, None, 2), CPU, names
    )

    ranks = run.run(2, [Part(torch.ones(4, 2), target=torch.zeros(4, 2))], [EVALUATION, TRAINING])

    assert [sorted(rank[2].tensors[GRADIENT]) for rank in ranks] == [["0.bias", "0.weight"], ["1.bias", "1.weight"]]
    assert [OUTPUT in rank[1].tensors for rank in ranks] == [False, True]


def test_the_error_of_the_rank_to_blame_is_raised():
    def make():
        raise RuntimeError("no layers")

    run = PartsRun(make, "1f1b", Objective(nn.functional.mse_loss, None, 2), CPU, {})

    with pytest.raises(RuntimeError, match="no layers"):
        run.run(2, [Part(torch.ones(4, 2))], [EVALUATION])


def test_names_hold_for_as_long_as_the_layers_do():
    model = Plain()

    assert RankLayers.of(model, []).model is model
