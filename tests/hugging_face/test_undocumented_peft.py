"""What the code relies on and peft does not promise; a failure here says which fact a new version changed."""

import copy
import json
from threading import Thread

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.hugging_face import undocumented_peft
from penstock.hugging_face.undocumented_peft import (
    PREFIX,
    adapted_modules,
    config_for,
    is_peft_model,
    merged,
    names_in_file,
    names_without,
    projections_of,
    settings_of_modules,
    share_projections,
    wrapped,
    write_settings,
)
from penstock.models.cutting.placeholders import on_meta
from tests.hugging_face.families import model_of
from tests.support.local_pipelines import error_of

peft = pytest.importorskip("peft")

QUERY, HEAD = "model.layers.0.self_attn.q_proj", "lm_head"


def lora(**options):
    settings = {"r": 2, "target_modules": ["layers.0.self_attn.q_proj"], "modules_to_save": [HEAD]}
    return peft.LoraConfig(**{**settings, "task_type": "CAUSAL_LM", **options})


def test_a_missing_library_is_told_with_the_way_to_install_it(monkeypatch):
    def missing(name):
        raise ImportError("No module named 'peft'")

    monkeypatch.setattr(undocumented_peft, "import_module", missing)

    error = error_of(undocumented_peft.peft)
    assert type(error) is ConfigError
    assert 'pip install ".[peft]"' in str(error)


def test_the_wrapper_around_a_model_is_known_by_its_module():
    model = model_of("llama")

    assert is_peft_model(peft.get_peft_model(model, lora()))
    assert not is_peft_model(model_of("llama"))
    assert not is_peft_model(nn.Linear(2, 2))


@pytest.mark.parametrize("rule", [True, "pissa", "olora"])
def test_a_model_without_values_gets_an_adapter_without_values_and_other_threads_do_not_notice(rule):
    config = lora(init_lora_weights=rule)
    made = []
    thread = Thread(target=lambda: made.extend(nn.Linear(2, 2).weight.device.type for _ in range(200)))

    thread.start()
    model = wrapped(on_meta(model_of("llama")), config, "default")
    thread.join()

    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert config.init_lora_weights == rule
    assert set(made) == {"cpu"}


def test_names_of_modules_and_tensors_with_an_adapter():
    model = peft.get_peft_model(model_of("llama"), lora())
    plain_names = set(model_of("llama").state_dict())
    whole = model.get_base_model()

    assert adapted_modules(whole) == ({QUERY: None}, {HEAD: None})
    names = names_without(whole)
    assert names[f"{QUERY}.base_layer.weight"] == f"{QUERY}.weight"
    assert names[f"{HEAD}.original_module.weight"] == f"{HEAD}.weight"
    assert sorted(names.values()) == sorted(plain_names)
    assert names_in_file(model, "default") == {
        f"{QUERY}.lora_A.default.weight": f"{PREFIX}{QUERY}.lora_A.weight",
        f"{QUERY}.lora_B.default.weight": f"{PREFIX}{QUERY}.lora_B.weight",
        f"{HEAD}.modules_to_save.default.weight": f"{PREFIX}{HEAD}.weight",
    }


@pytest.mark.parametrize(("targets", "copied"), [([QUERY], [HEAD]), ([QUERY], []), ([], [HEAD])])
def test_a_part_gets_exactly_the_modules_that_are_named(targets, copied):
    config = lora(target_modules="all-linear", exclude_modules=["k_proj"], rank_pattern={"q_proj": 4, "v_proj": 3})
    local_config = config_for(config, targets, copied)
    part = model_of("llama")

    wrapped(part, local_config, "default")

    assert [list(names) for names in adapted_modules(part)] == [targets, copied]
    assert local_config.rank_pattern == ({"q_proj": 4} if targets else {})
    if targets:
        assert part.get_submodule(QUERY).lora_A["default"].weight.shape[0] == 4


def test_the_matrices_that_layers_of_vera_share_are_drawn_as_peft_draws_them():
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "down_proj"], projection_prng_key=3)
    model = peft.get_peft_model(model_of("llama"), copy.deepcopy(config))

    drawn = projections_of(wrapped(on_meta(model_of("llama")), config, "default"), "default")

    assert drawn.keys() == {"vera_A", "vera_B"}
    for name, value in drawn.items():
        assert torch.equal(value, getattr(model.base_model, name)["default"])
    share_projections(model, "default", {"vera_A": drawn["vera_A"] + 1})
    layer = model.get_base_model().get_submodule(QUERY)
    assert torch.equal(layer.vera_A["default"], drawn["vera_A"] + 1)
    assert projections_of(peft.get_peft_model(model_of("llama"), lora()), "default") == {}


def test_a_module_is_merged_with_its_adapter_or_is_the_trained_copy():
    model = peft.get_peft_model(model_of("llama"), lora(init_lora_weights=False)).get_base_model()
    query, head = model.get_submodule(QUERY), model.get_submodule(HEAD)
    wanted = query.base_layer.weight + query.get_delta_weight("default")

    torch.testing.assert_close(merged(query, "default").weight, wanted)
    assert merged(head, "default") is head.modules_to_save["default"]


@pytest.mark.parametrize("name", ["default", "mine"])
def test_peft_writes_its_settings_without_values(tmp_path, name):
    model = wrapped(on_meta(model_of("llama")), lora(), name)

    write_settings(model, name, tmp_path / "folder")

    files = sorted(path.name for path in (tmp_path / "folder").iterdir())
    assert files == ["README.md", "adapter_config.json"]
    assert json.loads((tmp_path / "folder" / "adapter_config.json").read_text())["r"] == 2


def test_modules_have_the_scales_and_forms_of_their_adapters_as_attributes():
    names = [QUERY]
    scaled = peft.get_peft_model(model_of("llama"), lora(modules_to_save=None, lora_alpha=6, use_rslora=True))
    fed = peft.get_peft_model(
        model_of("llama"), peft.IA3Config(target_modules=names, feedforward_modules=[], task_type="CAUSAL_LM")
    )
    drawn = peft.VeraConfig(r=2, target_modules=names, save_projection=False, projection_prng_key=5)

    found = [
        settings_of_modules(model.get_base_model(), model.peft_config["default"])
        for model in (scaled, fed, peft.get_peft_model(model_of("llama"), drawn))
    ]

    wanted = {"lora_alpha": 6, "use_rslora": True, "scaling": 6 / 2**0.5, "fan_in_fan_out": False}
    assert found == [
        {QUERY: wanted},
        {QUERY: {"fan_in_fan_out": False, "is_feedforward": False}},
        {QUERY: {"projection_prng_key": 5, "fan_in_fan_out": False}},
    ]


def test_a_module_takes_the_first_pattern_that_means_it_and_the_file_sorts_patterns(tmp_path):
    patterns = {"q_proj": 3, QUERY: 2}
    model = peft.get_peft_model(model_of("llama"), lora(modules_to_save=None, rank_pattern=dict(patterns)))
    model.save_pretrained(tmp_path)

    assert model.get_base_model().get_submodule(QUERY).r["default"] == 3
    assert list(json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"]) == sorted(patterns)
