"""What is no model of a decoder is refused in one message, before any layer is built."""

from types import SimpleNamespace

import pytest
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.models.hugging_face import source as sources
from tests.models.hugging_face.families import config_of, model_of

transformers = pytest.importorskip("transformers")


def refused(source, **options):
    with pytest.raises(ConfigError) as caught:
        ps.from_transformers(source, **options)
    return str(caught.value)


def test_no_folder_and_no_config_in_it(tmp_path):
    assert "there is no such folder" in refused(tmp_path / "none")
    assert "holds no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as a config" in refused(tmp_path)
    assert "expected a folder, a config or a model" in refused(3)


def test_a_model_that_is_no_decoder_is_named():
    seq2seq = transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4, vocab_size=9)
    assert "has an encoder beside its decoder (t5)" in refused(seq2seq)
    vision = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    assert "makes no causal language model" in refused(vision)
    assert "a Linear; expected a causal language model" in refused(nn.Linear(2, 2))


def test_settings_that_a_pipeline_cannot_run_are_named():
    quantized = config_of("llama")
    quantized.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert "quantization_config" in refused(quantized)
    checkpointing = model_of("llama")
    checkpointing.gradient_checkpointing_enable()
    assert "recompute=True" in refused(checkpointing)
    placed = model_of("llama")
    placed.hf_device_map = {"": 0}
    assert "device map" in refused(placed)


def test_two_lists_of_layers_are_refused_by_name():
    model = model_of("llama")
    model.extra = nn.ModuleList([nn.Linear(2, 2)])

    assert "has 2 lists of layers ('model.layers', 'extra')" in refused(model)


def test_an_older_or_missing_library_is_told_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(sources, "import_module", lambda name: SimpleNamespace(__version__="4.57.1"))
    assert "transformers is 4.57.1; expected 5 or later" in refused(config_of("llama"))

    def missing(name):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(sources, "import_module", missing)
    assert 'pip install ".[transformers]"' in refused(config_of("llama"))
