"""The models that a plan takes."""

import pytest
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.losses.chunked import chunked_cross_entropy
from penstock.execute.losses.tails import unwrapped
from penstock.hugging_face.from_transformers import from_transformers
from penstock.models import cross_entropy_loss
from penstock.run_planning.model import DEFAULT_PRECISION, planned_model
from tests.run_planning.cases import RUN, write_run

SOURCE = """
from torch import nn


def make(vocabulary, length):
    return [nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary)]
"""


def test_the_model_of_a_run_file_is_in_its_precision_and_its_file_is_the_base(tmp_path):
    run_file, _ = write_run(tmp_path)

    model = planned_model(str(run_file), None, 64)

    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    assert model.module_names == [[name] for name in names]
    assert model.base_text == RUN
    assert model.precision.compute == "model"
    assert (model.settings, model.no_run_file) == ({}, "")


def test_a_function_makes_layers_and_a_run_file_names_it(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    place = f"{tmp_path / 'mine.py'}:make"

    model = planned_model(place, None, 64)

    assert len(model.layers) == 2
    assert model.settings == {"source": place}
    assert model.precision == DEFAULT_PRECISION


def test_a_folder_needs_its_config_alone_but_no_run_file_begins_without_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
    transformers.LlamaConfig(vocab_size=64, **sizes).save_pretrained(tmp_path)

    model = planned_model(tmp_path, None, 64)

    assert len(model.layers) == 5
    assert "has no weights, with which a run of it begins" in model.no_run_file
    assert model.module_names == [
        ["model.embed_tokens"], *([f"model.layers.{block}"] for block in range(3)), ["lm_head", "model.norm"]
    ]  # fmt: skip
    assert str(next(model.layers[0]().parameters()).dtype) == "torch.bfloat16"


def test_layers_get_the_loss_of_next_tokens_or_bring_their_own(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    own = from_transformers(config)

    assert planned_model([nn.Embedding(8, 4), nn.Linear(4, 8)], None, 64).loss is cross_entropy_loss
    assert planned_model(own, None, 64).layers is own
    assert planned_model(own, None, 64).loss is None


def test_loss_precision_and_optimizer_of_a_base_count_for_every_model(tmp_path):
    more = '[loss]\nchunk = 16\n[optimizer]\nname = "SGD"\n[precision]\ncompute = "float16"\n'
    run_file, _ = write_run(tmp_path, RUN + more)

    model = planned_model([nn.Embedding(8, 4), nn.Linear(4, 8)], run_file, 64)

    assert (model.precision.compute, model.optimizer.name) == ("float16", "SGD")
    assert unwrapped(model.loss) is chunked_cross_entropy


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (5, "model: 5 of type int; expected a folder, a run file, or a list of layers"),
        ([], "model: the list has no layers"),
        ("nowhere", "nowhere: there is no such folder"),
        ("nowhere.toml", r"nowhere\.toml"),
        ("nowhere.py:make", r"nowhere\.py"),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        planned_model(model, None, 64)
