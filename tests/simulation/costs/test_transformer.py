"""FLOPs and bytes of transformers against published formulas."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.simulation.costs.transformer import Transformer, embedding_of, head_of, layer_of

TEXT = (Path(__file__).parents[2] / "data" / "published_memory.json").read_text(encoding="utf-8")
PUBLISHED = json.loads(TEXT)["per_token"]
SMALL = Transformer(num_layers=2, hidden=64, num_heads=4, vocabulary=1000, sequence=16, microbatch=3)


def sized(row, **options):
    sizes = {key: row[key] for key in ("hidden", "sequence")}
    return Transformer(num_layers=24, num_heads=row["heads"], vocabulary=50_000, **sizes, **options)


def test_activations_and_contexts_are_those_of_the_zero_bubble_paper():
    wrong = 0
    for row in PUBLISHED:
        layer, tokens = layer_of(sized(row, microbatch=6)), 6 * row["sequence"]
        wrong += layer.activation_bytes != row["activation_units"] * tokens
        wrong += layer.weight_context_bytes != row["weight_context_units"] * tokens
        assert row["activation_units"] == 34 * row["hidden"] + 5 * row["heads"] * row["sequence"]

    print(f"activations and contexts: {2 * len(PUBLISHED) - wrong} of {2 * len(PUBLISHED)} cells")
    assert not wrong


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_flops_of_a_layer_are_those_of_the_zero_bubble_paper(row):
    hidden, sequence = row["hidden"], row["sequence"]

    layer, unit = layer_of(sized(row, microbatch=2)), 2 * sequence * hidden

    assert layer.forward_flops == unit * (24 * hidden + 4 * sequence)
    assert layer.backward_input_flops == unit * (24 * hidden + 8 * sequence)
    assert layer.backward_weight_flops == unit * 24 * hidden


@pytest.mark.parametrize(
    ("model", "billions", "tolerance"),
    [
        (Transformer(num_layers=96, hidden=12288, num_heads=96, vocabulary=50257, sequence=2048), 174.6, 0.01),  # GPT-3
        (
            Transformer(num_layers=80, hidden=8192, num_heads=64, num_key_value_heads=8, feed_forward=28672,
                        is_gated=True, vocabulary=128256, sequence=8192), 70.6, 0.002,  # Llama 3 70B
        ),
        (
            Transformer(num_layers=32, hidden=4096, num_heads=32, feed_forward=11008, is_gated=True, vocabulary=32000,
                        sequence=4096), 6.738, 0.001,  # Llama 2 7B
        ),
    ],
    ids=["GPT-3", "Llama 3 70B", "Llama 2 7B"],
)  # fmt: skip
def test_models_have_about_as_many_parameters_as_they_are_known_for(model, billions, tolerance):
    total = model.num_layers * layer_of(model).num_parameters + head_of(model).num_parameters
    if model.num_key_value_heads or model.is_gated:
        total += embedding_of(model).num_parameters  # GPT-3 shares it with the head

    assert total / 1e9 == pytest.approx(billions, rel=tolerance)


def test_a_causal_mask_halves_the_attention_and_nothing_else():
    full, causal = layer_of(SMALL), layer_of(replace(SMALL, is_causal=True))
    attention = 4 * SMALL.tokens * SMALL.sequence * SMALL.hidden

    assert full.forward_flops - causal.forward_flops == attention / 2
    assert full.backward_input_flops - causal.backward_input_flops == attention
    assert full.backward_weight_flops == causal.backward_weight_flops


def test_without_stored_scores_and_dropout_32_bytes_per_feature_are_kept_and_a_mask_is_one_byte_per_number():
    lean = layer_of(replace(SMALL, keeps_attention_scores=False, has_dropout=False))
    with_masks, without = layer_of(SMALL), layer_of(replace(SMALL, has_dropout=False))
    pairs = SMALL.num_heads * SMALL.sequence * SMALL.tokens

    assert lean.activation_bytes == lean.weight_context_bytes == 32 * SMALL.tokens * SMALL.hidden
    # Two masks of the width, one of the scores, and the scores once more after the dropout.
    assert with_masks.activation_bytes - without.activation_bytes == 2 * SMALL.tokens * SMALL.hidden + 3 * pairs


def test_numbers_of_32_bits_take_twice_the_bytes_and_masks_stay():
    short, long = (layer_of(replace(SMALL, data_type=kind, keeps_attention_scores=False)) for kind in ("bf16", "fp32"))
    masks = 2 * SMALL.tokens * SMALL.hidden

    assert long.activation_bytes - masks == 2 * (short.activation_bytes - masks)
    assert long.weight_context_bytes == 2 * short.weight_context_bytes
    assert replace(SMALL, data_type="tf32").message_bytes == 2 * SMALL.message_bytes == 4 * 16 * 3 * 64


def test_fewer_key_and_value_heads_save_their_share_and_a_gated_feed_forward_part_has_three_matrices():
    grouped = replace(SMALL, num_key_value_heads=1)
    plain, gated = replace(SMALL, feed_forward=100), replace(SMALL, feed_forward=100, is_gated=True)

    assert grouped.key_value_width == 16
    assert layer_of(SMALL).num_parameters - layer_of(grouped).num_parameters == 2 * 64 * (64 - 16)
    assert layer_of(gated).num_parameters - layer_of(plain).num_parameters == 64 * 100
    assert layer_of(gated).weight_context_bytes - layer_of(plain).weight_context_bytes == 2 * SMALL.tokens * 100


def test_the_embedding_computes_nothing_and_the_head_one_product():
    embedding, head = embedding_of(SMALL), head_of(SMALL)

    assert embedding.forward_flops == embedding.backward_weight_flops == 0
    assert embedding.num_parameters == 1000 * 64
    assert head.forward_flops == head.backward_input_flops == head.backward_weight_flops == 2 * 48 * 64 * 1000
    assert head.activation_bytes == 48 * (4 * 64 + 4 * 1000)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_layers", 0, "num_layers: 0; give 1 or more"),
        ("microbatch", -1, "microbatch: -1; give 1 or more"),
        ("num_heads", 5, "num_heads: 5 does not divide the width of 64"),
        ("num_key_value_heads", 3, "num_key_value_heads: 3 does not divide the 4 heads"),
        ("num_key_value_heads", 0, "num_key_value_heads: 0 does not divide the 4 heads"),
        ("data_type", "int8", "data_type: there is no type 'int8'; known: bf16, fp16, tf32, fp32"),
    ],
)
def test_a_model_that_cannot_be_is_refused(key, value, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        replace(SMALL, **{key: value})
