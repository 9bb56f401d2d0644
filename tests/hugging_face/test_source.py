"""What is no model of a decoder is refused in one message, before any layer is built."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.hugging_face import source as sources
from tests.hugging_face.families import config_of, model_of
from tests.hugging_face.tiny_models import saved_model

transformers = pytest.importorskip("transformers")


def refused(source, **options):
    with pytest.raises(ConfigError) as caught:
        ps.from_transformers(source, **options)
    return str(caught.value)


def test_no_folder_and_no_config_in_it(tmp_path):
    assert "there is no such folder" in refused(tmp_path / "none")
    assert "holds no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "expected a folder, a config or a model" in refused(3)


def test_a_name_of_the_hub_is_its_folder_in_the_cache(tmp_path, monkeypatch):
    cached = tmp_path / "models--some--llama"
    folder = cached / "snapshots" / ("0" * 40)
    saved_model("llama", folder)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert sources.folder_of("some/llama") == folder
    assert ps.from_transformers("some/llama").source == ps.from_transformers(folder).source
    assert ps.from_transformers("some/llama").whole.name_or_path == "some/llama"  # which adapters on it say
    for name in ("some/other", "no name/of/the hub"):
        assert f"or download the model first, as by hf download {name}" in refused(name)


def test_a_type_that_no_parameter_can_have_is_refused():
    assert "dtype: 'bfloat16' of type str; expected a floating-point torch.dtype" in refused(
        config_of("llama"), dtype="bfloat16"
    )
    assert "torch.int8" in refused(config_of("llama"), dtype=torch.int8)


class PeftModel(nn.Module):
    """An adapter around a model."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def test_what_is_no_model_of_transformers_and_settings_that_a_pipeline_cannot_run_are_named():
    vision = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    dropping = transformers.OPTConfig(**OPT, layerdrop=0.1)
    quantized, (checkpointing, placed) = config_of("llama"), (model_of("llama") for _ in range(2))
    quantized.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    checkpointing.gradient_checkpointing_enable()
    placed.hf_device_map = {"": 0}

    for told, source in {
        "makes no model of it": vision,
        "a Linear; expected a model of transformers": nn.Linear(2, 2),
        "a PeftModel; expected a model of transformers, without an adapter around it (of": PeftModel(placed),
        "quantization_config": quantized,
        "recompute=True": checkpointing,
        "device map": placed,
        "'model.decoder' has layerdrop=0.1: layer drop leaves out blocks at random": dropping,
    }.items():
        assert told in refused(source)


OPT = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_adapters_whose_ranks_a_wrapper_changes_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10)
    adapted = peft.get_peft_model(model_of("llama"), config)

    assert "is of AdaLoRA, whose ranks and loss" in refused(adapted.base_model.model)


def test_an_older_or_missing_library_is_told_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(sources, "import_module", lambda name: SimpleNamespace(__version__="4.57.1"))
    assert "transformers is 4.57.1; expected 5 or later" in refused(config_of("llama"))

    def missing(name):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(sources, "import_module", missing)
    assert 'pip install ".[transformers]"' in refused(config_of("llama"))


@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_a_folder_gives_names_and_shapes_and_no_values(tmp_path, family):
    saved = saved_model(family, tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()

    found = sources.on_meta(tmp_path, tmp_path)

    assert type(found) is type(saved.model)
    state = found.state_dict()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in saved.state.items()}
    assert {value.device.type for value in found.parameters()} == {"meta"}


def test_the_generation_config_is_that_of_the_folder(tmp_path):
    saved = saved_model("llama", tmp_path)
    saved.model.generation_config.max_new_tokens = 7
    saved.model.generation_config.save_pretrained(tmp_path)
    assert sources.on_meta(tmp_path, tmp_path).generation_config.max_new_tokens == 7

    (tmp_path / "generation_config.json").unlink()
    assert sources.on_meta(tmp_path, tmp_path).generation_config.max_new_tokens is None


@pytest.mark.parametrize(
    "config", ["{", "{}", json.dumps({"model_type": "none"}), json.dumps({"model_type": "clip_vision_model"})]
)
def test_a_config_of_no_model_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(config)

    assert f"{tmp_path / 'config.json'}: transformers makes no model of it" in refused(tmp_path)


def test_code_of_the_folder_is_not_run(tmp_path):
    saved_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    refused(tmp_path)

    assert not (tmp_path / "ran").exists()


def test_a_whole_model_has_the_values_of_its_folder(tmp_path, capfd):
    saved = saved_model("llama", tmp_path)

    whole = sources.with_values(tmp_path, torch.float64)

    assert all(torch.equal(value, saved.state[name].double()) for name, value in whole.state_dict().items())
    assert "Loading" not in capfd.readouterr().err
    assert transformers.logging.is_progress_bar_enabled()


def test_a_folder_without_weights_is_refused(tmp_path):
    saved_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match="transformers cannot load the model"):
        sources.with_values(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_what_transformers_loads_in_float32_is_so_in_every_type_and_trains(tmp_path, dtype):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    experts = {
        "num_attention_heads": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
    further = {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**sizes, **experts, **ranks, **further)
    transformers.AutoModelForCausalLM.from_config(config).to(dtype or torch.bfloat16).save_pretrained(tmp_path)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype or "auto")
    model = ps.from_transformers(tmp_path, dtype=dtype)
    pipeline = ps.Pipeline(model, "1f1b", 2, ranks=1)

    types = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert torch.float32 in types.values()
    assert {name: tensor.dtype for name, tensor in pipeline.state_dict().items()} == types
    tokens = torch.randint(3, 32, (4, 6))
    assert torch.isfinite(pipeline.step(tokens, target=tokens).loss)
