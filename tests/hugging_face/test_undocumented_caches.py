"""What the code relies on in caches of transformers; each test says which fact a new version has changed."""

import inspect

import pytest
import torch

from penstock.hugging_face.undocumented_caches import (
    cache_argument,
    inputs_of_forward,
    longest_text,
    rank_cache,
    unstretched_text,
)
from tests.hugging_face.families import SHAPE, config_of, model_of

transformers = pytest.importorskip("transformers")

FAMILIES_BY_LAYERS = {"full": "llama", "sliding": "mistral", "both": "gemma3"}
HYBRID = {**SHAPE, "num_hidden_layers": 4, "num_key_value_heads": 2, "attn_layer_indices": [1, 3]}


def keys(length):
    return torch.randn(2, 2, length, 8)


@pytest.mark.parametrize("family", FAMILIES_BY_LAYERS.values(), ids=list(FAMILIES_BY_LAYERS))
def test_a_rank_knows_all_lengths_without_the_layers_of_others(family):
    config = config_of(family)
    whole, part = transformers.DynamicCache(config=config), rank_cache(config)
    for length in (3, 1, 5, 1, 1):
        assert part.common == part.get_seq_length() == part.get_query_offset() == whole.get_seq_length()
        for layer in range(config.num_hidden_layers):
            assert part.get_mask_sizes(length, layer) == whole.get_mask_sizes(length, layer)
        for layer in range(config.num_hidden_layers):
            states = keys(length)
            found = whole.update(states, states, layer)[0]
            if layer > 3:
                assert torch.equal(part.update(states, states, layer)[0], found), "a cache gives back other keys"
                assert part.get_seq_length() == part.seen, "the length changes within a forward"
            bare_keys, _ = part.without_values().update(states.to("meta"), states.to("meta"), layer)
            assert bare_keys.shape == found.shape, "a block without values would see other shapes"
        part.advance(length)
        assert part.filled_layers() == [4, 5]
    assert part.expected_layers() == list(range(6))
    assert all(part.layers[index].keys is None for index in range(4)), "layers of other ranks hold memory"
    part.release()
    assert part.layers == []


def test_a_cache_whose_layer_was_filled_by_another_number_of_tokens_is_found():
    part = rank_cache(config_of("llama"))
    part.update(keys(3), keys(3), 0)
    part.update(keys(2), keys(2), 1)
    part.advance(3)

    assert part.filled_layers() == [0]


def test_layers_with_a_recurrent_state_have_one_once_a_token_was_read():
    config = transformers.BambaConfig(**HYBRID, mamba_n_heads=4, mamba_d_head=16)
    part = rank_cache(config)
    layers = [type(layer).__name__ for layer in part.layers]

    assert "LinearAttentionLayer" in layers, f"hybrids have the layers {layers} now"
    assert not part.has_previous_state()
    linear = layers.index("LinearAttentionLayer")
    part.update_conv_state(torch.randn(2, 8, 4), linear)
    part.update_recurrent_state(torch.randn(2, 4, 8), linear)
    part.advance(3)
    assert part.has_previous_state()
    assert part.has_previous_state(linear)
    assert part.filled_layers() == [linear]


def test_the_argument_for_a_cache_is_found_by_its_name():
    def forward(input_ids, cache_params=None): ...

    def takes_any(input_ids, **kwargs): ...

    def takes_none(input_ids): ...

    for function, name in ((forward, "cache_params"), (takes_any, "past_key_values"), (takes_none, "")):
        model = type("Model", (), {"forward": staticmethod(function)})()
        assert cache_argument(model) == name
    assert cache_argument(model_of("llama")) == "past_key_values"


def test_a_forward_gets_what_generate_of_transformers_gives_it():
    model, seen = model_of("llama").eval(), []
    text = torch.tensor([[0, 5, 9], [4, 8, 3]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    forward = model.forward

    def noted(**arguments):
        seen.append({name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)})
        return forward(**arguments)

    noted.__signature__ = inspect.signature(forward)
    model.forward = noted
    texts = model.generate(text, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
    kept = rank_cache(model.config)

    for number, expected in enumerate(seen):
        so_far = texts[:, : 3 + number]
        whole_mask = torch.cat([mask, torch.ones(2, number, dtype=torch.int64)], 1)
        found = inputs_of_forward(model, so_far, whole_mask, kept)
        assert found["past_key_values"] is kept
        assert found["use_cache"] is True
        assert found["logits_to_keep"] == 1
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        assert tensors.keys() | {"input_ids"} == expected.keys(), "generate passes other tensors now"
        assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
        kept.advance(expected["input_ids"].shape[1])
    assert "attention_mask" not in inputs_of_forward(model, text, torch.ones_like(mask), rank_cache(model.config))


def test_configs_say_how_many_positions_a_model_has():
    assert longest_text(config_of("llama")) == 64
    assert longest_text(config_of("gpt2")) == 64
    assert longest_text(transformers.BloomConfig()) == 0


def test_configs_say_up_to_which_position_a_model_takes_its_first_rotary_factors():
    import transformers

    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    stretched = transformers.Phi3Config(
        hidden_size=32, num_attention_heads=4, rope_parameters=factors, original_max_position_embeddings=10
    )
    assert unstretched_text(stretched) == 10
    assert unstretched_text(config_of("phi3")) == unstretched_text(config_of("gemma3")) == 0
    assert unstretched_text(config_of("gpt2")) == 0
