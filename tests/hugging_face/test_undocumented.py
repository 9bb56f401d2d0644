"""What the code relies on and transformers does not promise; a failure here says which fact a new version changed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from penstock.hugging_face.undocumented import (
    LossKind,
    collect_outputs,
    collects_outputs,
    conversions,
    device_map_of,
    give_values,
    has_balance_loss,
    is_quantized,
    loss_kind,
    made_of_config,
    missing_and_strange,
    parameters_on_meta,
    reverted,
    router_class,
    tied_names,
    unsaved_names,
)
from tests.hugging_face import tiny_further
from tests.hugging_face.families import FAMILIES, batch_of, model_of
from tests.hugging_face.tiny_models import config_of, empty_model

pytest.importorskip("transformers")

BY_DEFAULT = ("llama", "gemma2", "mixtral", "gpt2")
SOME_FAMILIES = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAMILIES]
LAYER = "model.layers.0"
IN_FILES = f"{LAYER}.block_sparse_moe.experts"


def sources_of(model, names):
    found, strange = conversions(model, names)
    return {each.first: [name for name, _ in each.sources] for each in found}, strange


def meta(*shape):
    return torch.empty(shape, device="meta")


def test_a_converter_takes_tensors_and_joins_those_of_its_patterns_in_the_order_of_their_numbers():
    model = empty_model(config_of("mixtral"))
    values = {f"{IN_FILES}.{e}.{part}.weight": torch.randn(24, 16) for part in ("w1", "w3") for e in range(12)}
    [conversion], strange = conversions(model, values)

    given = dict(values)
    [(name, found)] = conversion.convert(given, model).items()
    [bare] = conversion.convert({name: meta(24, 16) for name, _ in conversion.sources}, model).values()

    gate_up = [torch.cat([values[f"{IN_FILES}.{e}.{part}.weight"] for part in ("w1", "w3")]) for e in range(12)]
    assert (name, strange) == (f"{LAYER}.mlp.experts.gate_up_proj", {}), (
        "get_model_conversion_mapping or rename_source_key: files of Mixtral become other tensors now"
    )
    assert torch.equal(found, torch.stack(gate_up)), (
        "WeightConverter.add_tensor, .convert or dot_natural_key: tensors are joined in another way now"
    )
    assert not given
    assert (bare.shape, bare.device.type) == ((12, 48, 16), "meta"), "WeightConverter.convert: needs values now"


def test_a_prefix_that_only_one_of_file_and_model_has_is_added_or_removed():
    model = empty_model(config_of("gpt2"))

    found, strange = sources_of(model, ["wte.weight", "h.0.attn.c_attn.weight", "head.weight"])

    assert found == {
        "transformer.wte.weight": ["wte.weight"],
        "transformer.h.0.attn.c_attn.weight": ["h.0.attn.c_attn.weight"],
    }, "rename_source_key: base_model_prefix is not added any more"
    assert strange == {"head.weight": "head.weight"}


def test_a_name_that_the_model_has_stays_where_the_rules_lead_nowhere(monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    model = empty_model(config_of("llama"))
    rules = [WeightRenaming("norm", "layer_norm")]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: rules)

    assert sources_of(model, ["model.norm.weight"]) == ({"model.norm.weight": ["model.norm.weight"]}, {})
    assert sources_of(model, ["norm.weight"]) == ({}, {"norm.weight": "layer_norm.weight"})


def test_the_way_back_takes_one_tensor_at_a_time():
    model = empty_model(config_of("mixtral", num_local_experts=2))

    found = reverted(model, {f"{LAYER}.mlp.experts.gate_up_proj": meta(2, 48, 16)})

    assert {name: tuple(value.shape) for name, value in found.items()} == {
        f"{IN_FILES}.{e}.{part}.weight": (24, 16) for e in range(2) for part in ("w1", "w3")
    }, "revert_weight_conversion: one tensor alone has another way back now"
    assert list(reverted(model, {f"{LAYER}.mlp.gate.weight": meta(2, 16)})) == [
        f"{LAYER}.block_sparse_moe.gate.weight"
    ], "revert_weight_conversion: renamings are not reverted any more"


def test_tensors_that_share_one_of_a_file_go_back_together():
    model = empty_model(config_of("hrm"))
    own = "up_proj.weight"
    prefix = next(name for name in model.state_dict() if name.endswith(own)).removesuffix(own)
    both = [f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"]

    alone = [reverted(model, {name: meta(24, 16)}) for name in both]
    [(name, together)] = reverted(model, dict.fromkeys(both, meta(24, 16))).items()

    assert [list(each) for each in alone] == [[name], [name]], (
        "revert_weight_conversion: a part of a file's tensor has another name than the whole now; units of "
        "pretrained_out.py rely on it"
    )
    assert together.shape == (48, 16)


def test_attributes_of_models_and_configs_say_what_is_tied_unsaved_quantized_and_placed():
    tied, plain, model = (empty_model(config_of(family)) for family in ("llama-tied", "llama", "llama"))
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    model.config.quantization_config = {"quant_method": "fp8"}
    model.hf_device_map = {"": "cpu"}

    assert [tied_names(each) for each in (plain, tied)] == [{}, {"lm_head.weight": "model.embed_tokens.weight"}], (
        "all_tied_weights_keys: it has another form now"
    )
    assert [unsaved_names(each) for each in (plain, model)] == [set(), {"model.norm.weight"}], (
        "_keys_to_ignore_on_save: it has another form now"
    )
    assert [is_quantized(each) for each in (plain, model)] == [False, True], "configs name quantization otherwise now"
    assert [device_map_of(each) for each in (plain, model)] == [None, {"": "cpu"}]


def test_transformers_knows_which_names_may_be_missing_or_left_over():
    model = empty_model(config_of("llama"))
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"

    missing, strange = missing_and_strange(model, ["model.norm.weight"], [old, "other.weight"])

    assert (missing, strange) == ({"model.norm.weight"}, {"other.weight"}), (
        "_adjust_missing_and_unexpected_keys: it changes other attributes now"
    )


@pytest.mark.parametrize("name", [*SOME_FAMILIES, "falcon_h1"])
def test_a_model_with_parameters_on_meta_has_the_buffers_of_a_real_one(name):
    whole = model_of(name, "eager") if name in FAMILIES else falcon_h1()

    with parameters_on_meta():
        bare = type(whole)(whole.config)

    assert all(parameter.is_meta for parameter in bare.parameters()), "a parameter is not registered any more"
    assert {key: each.requires_grad for key, each in bare.named_parameters()} == {
        key: each.requires_grad for key, each in whole.named_parameters()
    }
    for key, buffer in whole.named_buffers():
        assert torch.equal(bare.get_buffer(key), buffer), f"{key} depends on parameters now"
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())


def falcon_h1():
    """Return a model whose buffers in blocks are made by the parent of the blocks."""
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 8}
    mamba = {"mamba_d_ssm": 32, "mamba_d_state": 8, "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0]}
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**shape, **heads, **mamba))


def test_other_threads_make_parameters_with_values_meanwhile():
    with parameters_on_meta(), ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(nn.Linear, 2, 2).result()

        assert nn.Linear(2, 2).weight.is_meta
        assert not elsewhere.weight.is_meta


def test_init_weights_draws_the_values_of_one_module_by_the_rules_of_its_family():
    bare = empty_model(model_of("llama").config)
    block = bare.model.layers[0].to_empty(device="cpu")

    give_values(bare, list(block.modules()))

    assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(block.input_layernorm.weight, torch.ones(32))


def test_a_config_names_the_class_of_its_model():
    import transformers

    llama, t5 = config_of("llama"), tiny_further.config_of("t5")
    for name, expected in (
        ("LlamaForSequenceClassification", ...),
        ("Unknown", "LlamaForCausalLM"),
        (None, "LlamaForCausalLM"),
    ):
        llama.architectures = None if name is None else [name]
        assert type(made_of_config(transformers, llama)).__name__ == (name if expected is ... else expected)
    t5.architectures = None
    assert type(made_of_config(transformers, t5)).__name__ == "T5ForConditionalGeneration"


def test_hooks_collect_outputs_and_are_put_on_all_modules_once():
    model = tiny_further.model_of("llava")
    batch, _ = tiny_further.batch_of("llava")
    tower = model.model.vision_tower
    assert not collects_outputs(model)

    collect_outputs(model)
    hooks = [hook for module in tower.modules() for hook in module._forward_hooks.values()]
    loss = model(**batch).logits

    assert collects_outputs(model)
    assert hooks
    assert {hook.__name__ for hook in hooks} == {"output_capturing_hook"}, "collecting hooks have another name now"
    assert hooks == [hook for module in tower.modules() for hook in module._forward_hooks.values()]
    assert torch.equal(loss, tiny_further.model_of("llava")(**batch).logits)


def test_packed_sequences_are_apart_without_a_cache_and_not_with_one():
    model = model_of("llama").eval()
    tokens, _, keywords = batch_of("packed")
    alone = model(tokens[:, 5:], use_cache=False).logits

    apart = model(tokens, use_cache=False, **keywords).logits[:, 5:]
    together = model(tokens, use_cache=True, **keywords).logits[:, 5:]

    torch.testing.assert_close(apart, alone)
    assert not torch.allclose(together, alone), "use_cache=True keeps packed sequences apart now"


def test_the_loss_is_a_sum_over_num_items_in_batch():
    model = model_of("llama")
    logits, labels = torch.randn(2, 5, 64), torch.randint(64, (2, 5))

    summed = model.loss_function(logits, labels, vocab_size=64, num_items_in_batch=1)

    shifted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(summed, shifted)


def given_to_first_block(model, **batch):
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    model(**batch, use_cache=False)
    handle.remove()
    return seen[0]


def test_masks_follow_the_attention_of_the_config_that_all_modules_share():
    tokens, _, padded = batch_of("padded")
    causal = given_to_first_block(model_of("llama", "sdpa"), input_ids=tokens)
    eager = given_to_first_block(model_of("llama", "eager"), input_ids=tokens)
    masked = given_to_first_block(model_of("llama", "sdpa"), input_ids=tokens, **padded)

    assert causal["attention_mask"] is None, "sdpa gets a mask now where it is causal by itself"
    assert eager["attention_mask"].is_floating_point()
    assert masked["attention_mask"].dtype == torch.bool
    model = model_of("llama", "sdpa")
    assert model.model.layers[0].self_attn.config is model.config, "blocks have configs of their own now"


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_embeddings_may_take_the_place_of_tokens(family):
    model = model_of(family, "eager").eval()
    tokens, _, keywords = batch_of("padded")
    embedded = model.get_input_embeddings()(tokens)

    found = model(inputs_embeds=embedded, use_cache=False, **keywords).logits

    assert torch.equal(found, model(tokens, use_cache=False, **keywords).logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_routers_are_found_by_what_can_be_recorded(family):
    model = model_of(family)

    assert any(isinstance(module, router_class(model)) for module in model.model.layers[0].modules())
    assert has_balance_loss(model)
    assert router_class(model_of("llama")) is None


def test_a_forward_and_its_loss_function_say_of_what_kind_the_loss_is():
    import transformers

    config, t5, bart = config_of("llama"), tiny_further.config_of("t5"), tiny_further.config_of("bart")
    bert, gpt2 = tiny_further.config_of("bert"), config_of("gpt2")
    for kind, model_classes in {
        LossKind.SHIFTED: ((transformers.LlamaForCausalLM, config), (transformers.GPT2LMHeadModel, gpt2)),
        LossKind.TOKENS: (
            (transformers.T5ForConditionalGeneration, t5),
            (transformers.BartForCausalLM, bart),
            (transformers.LlamaForTokenClassification, config),
        ),
        LossKind.CLASSES: (
            (transformers.LlamaForSequenceClassification, config),
            (transformers.BertForSequenceClassification, bert),
        ),
        LossKind.UNKNOWN: (
            (transformers.LlamaModel, config),
            (transformers.LlamaForQuestionAnswering, config),
            (transformers.GPT2DoubleHeadsModel, gpt2),
        ),
    }.items():
        for model_class, model_config in model_classes:
            with torch.device("meta"):
                assert loss_kind(model_class(model_config)) is kind, model_class.__name__
