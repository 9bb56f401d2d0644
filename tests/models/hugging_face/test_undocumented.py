"""Canaries: what transformers does not promise, and this project relies on. Each says which fact has changed."""

import pytest
import torch
from torch import nn

from penstock.models.hugging_face.undocumented import device_map_of, give_values, make_unsaved_buffers, tied_names
from tests.models.hugging_face.families import FAMILIES, batch_of, config_of, model_of

transformers = pytest.importorskip("transformers")


def on_meta(family):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_init_weights_makes_buffers_that_are_not_saved(family):
    whole, bare = model_of(family, "eager"), on_meta(family)
    bare.lm_head = None  # its values are of no interest
    unsaved = [name for name, _ in whole.named_buffers() if name not in whole.state_dict()]

    make_unsaved_buffers(bare, bare, torch.device("cpu"))

    for name in unsaved:
        assert torch.equal(bare.get_buffer(name), whole.get_buffer(name)), f"_init_weights no longer makes {name}"


def test_init_weights_draws_the_values_of_one_module_by_the_rules_of_its_family():
    bare = on_meta("llama")
    block = bare.model.layers[0]

    give_values(bare, block, torch.device("cpu"))

    assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(block.input_layernorm.weight, torch.ones(32))


def test_all_tied_weights_keys_names_the_source_of_each_tied_parameter():
    assert tied_names(model_of("llama")) == {}
    assert tied_names(model_of("llama", tie_word_embeddings=True)) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_names(model_of("gpt2")) == {"lm_head.weight": "transformer.wte.weight"}


def test_a_device_map_is_noted_in_hf_device_map():
    model = model_of("llama")
    assert device_map_of(model) is None
    model.hf_device_map = {"": "cpu"}
    assert device_map_of(model) == {"": "cpu"}


def test_a_decoder_layer_returns_a_tensor():
    model = model_of("llama")
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))

    model(batch_of("plain")[0])

    assert isinstance(seen[0], torch.Tensor), "layers return tuples again"


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
