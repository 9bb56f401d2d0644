"""The decoder against plain formulas, and its parameters: names, first values, number."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.errors import PenstockError
from penstock.models.decoder import (
    NORM_EPSILON,
    ROTARY_BASE,
    Block,
    count_target_tokens,
    cross_entropy_loss,
    decoder_layers,
)
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layer import count_parameters

SMALL = DecoderConfig(
    vocabulary=11,
    width=16,
    layers=2,
    heads=4,
    key_value_heads=2,
    hidden=24,
    length=8,
    dtype="float64",
)


def changed(config, **values):
    return DecoderConfig(**(dict(config) | values))


def build(config):
    return {spec.name: spec() for spec in decoder_layers(config)}


def run(layers, tokens):
    return nn.Sequential(*layers.values())(tokens)


def some_tokens(batch=2, length=8):
    return torch.randint(SMALL.vocabulary, (batch, length))


def plain_rms_norm(module, x):
    return x / (x.pow(2).mean(-1, keepdim=True) + NORM_EPSILON).sqrt() * module.weight


def plain_rotation(x):
    """Turn one head's features [seq, head_width] as complex numbers."""
    half = x.shape[1] // 2
    turns = torch.tensor([[p * ROTARY_BASE ** (-i / half) for i in range(half)] for p in range(len(x))])
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat([turned.real, turned.imag], dim=1)


def plain_attention(module, x):
    """Attend head by head over x [seq, width]."""
    width = SMALL.head_width
    q, k, v = x @ module.query.weight.T, x @ module.key.weight.T, x @ module.value.weight.T
    mixed = []
    for head in range(SMALL.heads):
        shared = head // (SMALL.heads // SMALL.key_value_heads)
        own, other = slice(head * width, (head + 1) * width), slice(shared * width, (shared + 1) * width)
        scores = plain_rotation(q[:, own]) @ plain_rotation(k[:, other]).T / math.sqrt(width)
        future = torch.ones_like(scores).triu(1).bool()
        mixed.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, other])
    return torch.cat(mixed, dim=1) @ module.output.weight.T


def plain_block(module, x):
    x = x + plain_attention(module.attention, plain_rms_norm(module.attention_norm, x))
    normed = plain_rms_norm(module.feed_forward_norm, x)
    feed = module.feed_forward
    gate = normed @ feed.gate.weight.T
    return x + (gate * gate.sigmoid() * (normed @ feed.up.weight.T)) @ feed.down.weight.T


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_a_block_follows_the_formulas(key_value_heads, monkeypatch):
    config = changed(SMALL, key_value_heads=key_value_heads)
    monkeypatch.setitem(globals(), "SMALL", config)
    torch.set_default_dtype(torch.float64)
    try:
        block = Block(config)
        for parameter in block.parameters():
            nn.init.normal_(parameter)
        features = torch.randn(3, 8, config.width)

        expected = torch.stack([plain_block(block, sample) for sample in features])

        torch.testing.assert_close(block(features), expected, rtol=1e-11, atol=1e-11)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_head_sees_normed_features():
    layers = build(SMALL)
    tokens = some_tokens()
    features = layers["blocks.1"](layers["blocks.0"](layers["embedding"].weight[tokens]))

    expected = plain_rms_norm(layers["norm"], features) @ layers["head"].weight.T

    torch.testing.assert_close(run(layers, tokens), expected)


@pytest.mark.parametrize("lengths", [(3, 3, 2), (1, 7), (8,)])
def test_attention_over_slices_is_that_over_the_whole_sequence(lengths):
    attention = build(SMALL)["blocks.0"].attention
    features = torch.randn(2, 8, SMALL.width, dtype=torch.float64)
    before, outputs = None, []

    for part in features.split(lengths, 1):
        attention.carry.begin_slice(before, keeps=True)
        outputs.append(attention(part))
        before = attention.carry.end_slice()

    torch.testing.assert_close(torch.cat(outputs, 1), attention(features), rtol=1e-12, atol=1e-14)
    assert [tuple(tensor.shape) for tensor in before] == [(2, SMALL.key_value_heads, 8, SMALL.head_width)] * 2


def alone(layers, tokens, ends):
    """Logits of each document by itself, put together again."""
    return torch.cat([run(layers, part) for part in tokens.tensor_split(ends, dim=1)], dim=1)


def positions_of(ends, length=8):
    begins = torch.tensor([0, *ends])
    places = torch.arange(length)
    return places - begins[torch.searchsorted(begins, places, right=True) - 1]


ENDS = [3, 4], [], [1, 2, 7]


def test_a_document_of_a_packed_sequence_gets_the_logits_that_it_gets_alone():
    layers = {spec.name: spec() for spec in decoder_layers(SMALL, takes_positions=True)}
    tokens = some_tokens(batch=3)
    expected = torch.cat([alone(layers, row[None], ends) for row, ends in zip(tokens, ENDS, strict=True)])

    features = layers["embedding"](tokens)
    positions = torch.stack([positions_of(ends) for ends in ENDS])
    for index in range(SMALL.layers):
        features = layers[f"blocks.{index}"](features, positions=positions)
    found = layers["head"](layers["norm"](features))

    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(found[0], run(layers, tokens)[0], rtol=0, atol=1e-3)
    assert torch.equal(run(layers, tokens), run(build(SMALL), tokens))  # without positions it is a plain block


def test_sequences_and_slices_that_are_longer_together_than_the_tables_are_refused():
    attention = build(SMALL)["blocks.0"].attention
    attention.carry.begin_slice((torch.zeros(2, 2, 5, 4),) * 2, keeps=True)

    with pytest.raises(PenstockError, match="have 9 tokens, but the model is for at most 8"):
        attention(torch.randn(2, 4, SMALL.width, dtype=torch.float64))
    with pytest.raises(PenstockError, match="have 9 tokens, but the model is for at most 8"):
        run(build(SMALL), some_tokens(length=9))


def test_parameter_names_are_those_of_the_unsplit_model():
    names = [f"{prefix}.{name}" for prefix, module in build(SMALL).items() for name in module.state_dict()]

    block = [
        "attention_norm.weight",
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "output")),
        "feed_forward_norm.weight",
        *(f"feed_forward.{name}.weight" for name in ("gate", "up", "down")),
    ]
    blocks = [f"blocks.{index}.{name}" for index in range(2) for name in block]
    assert names == ["embedding.weight", *blocks, "norm.weight", "head.weight"]


@pytest.mark.parametrize("tied_head", [False, True])
def test_the_counted_parameters_are_the_built_ones(tied_head):
    specs = decoder_layers(changed(SMALL, tied_head=tied_head))
    built = sum(parameter.numel() for spec in specs for parameter in spec().parameters())

    assert count_parameters(specs) == built - tied_head * SMALL.vocabulary * SMALL.width


def test_weights_start_small_and_those_that_add_to_the_residual_smaller():
    wide = changed(SMALL, width=256, hidden=256, layers=8)
    deviations = {name: parameter.std().item() for name, parameter in decoder_layers(wide)[1]().named_parameters()}

    for name in ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
        assert deviations[f"{name}.weight"] == pytest.approx(0.02, rel=0.03)
    for name in ("attention.output", "feed_forward.down"):
        assert deviations[f"{name}.weight"] == pytest.approx(0.02 / 4, rel=0.03)


@pytest.mark.parametrize(("dtype", "table"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_parameters_have_the_asked_type_and_positions_stay_exact(dtype, table):
    layers = build(changed(SMALL, dtype=dtype))
    logits = run(layers, some_tokens())

    assert {parameter.dtype for layer in layers.values() for parameter in layer.parameters()} == {logits.dtype}
    assert str(logits.dtype) == f"torch.{dtype}"
    assert {str(buffer.dtype) for buffer in layers["blocks.0"].buffers()} == {f"torch.{table}"}


def test_a_tied_head_names_the_embedding_and_can_share_it():
    specs = decoder_layers(changed(SMALL, tied_head=True))
    layers = {spec.name: spec() for spec in specs}
    assert [spec.tied for spec in specs if spec.tied] == [(("weight", "embedding.weight"),)]
    layers["head"].weight = layers["embedding"].weight
    tokens = some_tokens()

    run(layers, tokens).square().sum().backward()

    alone = build(SMALL)
    alone["head"].weight = nn.Parameter(alone["embedding"].weight.detach().clone())
    run(alone, tokens).square().sum().backward()
    torch.testing.assert_close(layers["head"].weight.grad, alone["head"].weight.grad + alone["embedding"].weight.grad)


def test_layer_weights_are_relative_to_a_block():
    weights = {spec.name: spec.weight for spec in decoder_layers(SMALL)}
    # multiply-adds: query and output, keys and values, feed-forward; attention over 8 positions, half of them masked
    block = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 8 * 16

    assert weights["blocks.0"] == weights["blocks.1"] == 1
    assert weights["head"] == pytest.approx(16 * 11 / block)
    assert weights["embedding"] == 0
    assert 0 < weights["norm"] < 0.05


def test_the_loss_is_the_mean_over_the_counted_tokens():
    logits = torch.randn(2, 3, 5)
    target = torch.tensor([[1, -100, 4], [-100, -100, 0]])

    loss = cross_entropy_loss(logits, target)

    picked = [logits[0, 0].log_softmax(0)[1], logits[0, 2].log_softmax(0)[4], logits[1, 2].log_softmax(0)[0]]
    torch.testing.assert_close(loss, -sum(picked) / 3)
    assert count_target_tokens(target) == 3


def test_without_counted_tokens_loss_and_gradient_are_zero():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    target = torch.full((2, 3), -100)

    loss = cross_entropy_loss(logits, target)
    loss.backward()

    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert count_target_tokens(target) == 0


def test_half_precision_logits_give_a_float32_loss():
    logits, target = torch.randn(2, 3, 5).bfloat16(), torch.randint(5, (2, 3))

    loss = cross_entropy_loss(logits, target)

    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), target.flatten()))


def test_a_target_of_another_shape_is_refused():
    with pytest.raises(PenstockError, match=r"need a target of shape \(2, 3\), but it has \(3, 2\)"):
        cross_entropy_loss(torch.randn(2, 3, 5), torch.zeros(3, 2, dtype=torch.int64))
