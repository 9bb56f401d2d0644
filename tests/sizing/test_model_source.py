"""A model is named in any form that users have it in; a folder needs no weights."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.sizing.layer_work import layer_work
from penstock.sizing.model_source import layers_of
from tests.hugging_face.families import config_of, model_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_folder_with_a_config_alone_is_counted_as_its_model_is(family, tmp_path):
    config = config_of(family)
    config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

    works = [layer_work(source, sequence_length=16) for source in (tmp_path, str(tmp_path), config, model_of(family))]

    assert works[0] == works[1] == works[2] == works[3]


def test_layers_are_what_they_are():
    layers = ps.from_transformers(config_of("llama"))
    modules = [nn.Embedding(4, 2), nn.Linear(2, 4)]

    assert layers_of(layers) is layers
    assert layers_of(modules) is modules
    assert layers_of(nn.Sequential(*modules)) == modules


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no-such-folder", "there is no such folder"),
        (torch.zeros(2), "expected the layers of a model"),
        (nn.ModuleList(), "expected the layers of a model"),
    ],
)
def test_what_is_no_model_is_refused(source, words):
    with pytest.raises(ConfigError, match=words):
        layers_of(source)
