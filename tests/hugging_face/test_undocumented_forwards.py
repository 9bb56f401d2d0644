"""What the code relies on in forwards and configs of transformers, which does not promise it; see test_undocumented."""

import re

import pytest
import torch
from torch import nn

from penstock.hugging_face.undocumented import (
    NUM_EXPERTS,
    TOP_K,
    checkpoints_gradients,
    collect_outputs,
    copy_of_config,
    dtype_of_config,
    forward_settings,
    output_of,
    share_collecting_hooks,
    share_of_experts,
    state_names_of_class,
)
from penstock.models.cutting.frame import Frame, Template
from penstock.models.cutting.points import cut_model
from tests.hugging_face import tiny_further
from tests.hugging_face.families import FAMILIES, batch_of, config_of, model_of
from tests.hugging_face.test_undocumented import SOME_FAMILIES

pytest.importorskip("transformers")

MAKERS = {
    **dict.fromkeys(FAMILIES, lambda name: model_of(name, "eager")),
    **dict.fromkeys(tiny_further.ALL, tiny_further.model_of),
}
BY_KIND = ("llama", "mixtral", "t5", "bert-rows", "vit", "llava")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_KIND else pytest.mark.slow) for n in MAKERS])
def test_forwards_take_the_settings_of_training_and_return_logits_by_name(name):
    model = MAKERS[name](name)
    batch = tiny_further.batch_of(name)[0] if name in tiny_further.ALL else {"input_ids": batch_of("plain")[0]}

    settings = forward_settings(model)
    with torch.no_grad():
        output = model(**batch, **settings)

    assert settings["return_dict"] is True
    assert ("use_cache" in settings) == (model.can_generate() or hasattr(model.config, "use_cache"))
    assert output.get("past_key_values") is None, "use_cache=False leaves a cache now"
    assert output_of(output) is output.logits, "an output has no logits now"


def test_an_output_is_its_logits_or_its_last_state_or_all_of_it():
    assert output_of({"loss": 1, "logits": 2, "last_hidden_state": 3}) == 2
    assert output_of({"last_hidden_state": 3, "pooler_output": 4}) == 3
    assert output_of({"start_logits": 3}) == {"start_logits": 3}
    assert output_of((1, 2)) == (1, 2)


@pytest.mark.parametrize(("settings", "share"), [({}, 1.0), ({"num_local_experts": 4, "num_experts_per_tok": 1}, 0.25)])
def test_the_share_of_experts_is_that_of_the_language_model(settings, share):
    import transformers

    config = transformers.PreTrainedConfig(**settings)
    whole = transformers.LlavaConfig(text_config=transformers.MixtralConfig(**settings)) if settings else config

    assert share_of_experts(config) == share
    assert share_of_experts(whole) == share
    layered = transformers.PreTrainedConfig(num_experts=8, moe_topk=[1, 2])
    assert share_of_experts(layered) == 0.25


OWN_ROUTING = {"switch_transformers", "nllb-moe", "vitpose_backbone", "dbrx"}
"""The kinds of configs whose experts are no weights of three dimensions, so that their share is never asked for."""


@pytest.mark.slow
def test_all_configs_of_transformers_name_their_experts_in_known_ways():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    unknown = set()
    for kind, config_class in CONFIG_MAPPING.items():
        names = [name for each in config_class.__mro__ for name in vars(each).get("__annotations__", {})]
        has_experts = any(re.fullmatch(r"(moe_)?(num|n)_(local_|routed_)?experts", name) for name in names)
        if has_experts and kind not in OWN_ROUTING:
            settings = config_class().get_text_config().to_dict()
            if not settings.keys() & {*NUM_EXPERTS} or not settings.keys() & {*TOP_K}:
                unknown.add(kind)
    assert unknown == set(), "names of configs for their experts that NUM_EXPERTS and TOP_K lack"


def test_a_config_is_copied_by_its_dict_and_names_the_type_of_its_parameters():
    config = config_of("mixtral", dtype="bfloat16", architectures=["MixtralForCausalLM"])

    copied = copy_of_config(config)

    assert copied is not config
    assert copied.to_dict() == config.to_dict(), "from_dict(to_dict()) gives another config now"
    assert type(copied) is type(config)
    assert copied.architectures == ["MixtralForCausalLM"]
    assert [dtype_of_config(each) for each in (copied, config_of("llama"))] == [torch.bfloat16, torch.float32], (
        "config.dtype: it is no torch.dtype any more"
    )


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("kind", ["gradient", "activation"])
def test_modules_say_that_checkpointing_was_enabled(kind):
    model = model_of("llama")
    enable, disable = (getattr(model, f"{kind}_checkpointing_{change}", None) for change in ("enable", "disable"))
    if enable is None:
        pytest.skip("this version has no such method")
    assert not checkpoints_gradients(model)

    enable()
    assert checkpoints_gradients(model), "gradient_checkpointing is no attribute of modules any more"
    disable()
    assert not checkpoints_gradients(model)


@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_class_made_of_a_config_has_the_names_of_its_models(name):
    class Own(nn.Module):
        def __init__(self, config, further):
            super().__init__()

    model, own = MAKERS[name](name), Own(None, None)
    own.config = model.config

    assert state_names_of_class(model) == set(model.state_dict())
    assert state_names_of_class(own) is None


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_blocks_return_a_tensor(family):
    model, outputs = model_of(family, "eager"), []
    body = model.get_submodule(model.base_model_prefix)
    blocks = next(module for module in body.children() if isinstance(module, nn.ModuleList))
    blocks[0].register_forward_hook(lambda module, args, output: outputs.append(output))

    model(batch_of("plain")[0], use_cache=False)

    assert [type(output) for output in outputs] == [torch.Tensor], "blocks return tuples again"


def test_stand_ins_have_the_collecting_hooks_of_the_modules_whose_places_they_take():
    model = tiny_further.model_of("llava")
    collect_outputs(model)
    cut = cut_model(model, ["model.vision_tower.encoder.layers.*", "model.language_model.layers.*"])

    frame = Frame(Template(model, cut, share_collecting_hooks), torch.device("cpu"))

    for name in ("model.vision_tower.encoder.layers.0", "model.language_model.layers.0"):
        hooks = [list(side.get_submodule(name)._forward_hooks.values()) for side in (model, frame.model)]
        assert hooks[0], "blocks have no hooks that collect hidden states now"
        assert hooks[0] == hooks[1]
