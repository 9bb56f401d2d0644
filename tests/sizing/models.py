"""Small models whose sizes are counted, and what a pipeline's own report says of the same layers."""

import torch
from torch import nn

import penstock as ps
from penstock.models import DecoderConfig, decoder_layers
from tests.support.local_pipelines import on_ranks

LENGTH, ROWS, MICROBATCHES = 128, 2, 2
SMALL = DecoderConfig(vocabulary=512, width=64, hidden=192, layers=3, heads=4, key_value_heads=2, length=LENGTH)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
}
GPT2_SHAPE = {"n_embd": 64, "n_positions": 256, "vocab_size": 512, "n_layer": 4}
FIELDS = (
    *("activation_bytes", "weight_context_bytes", "checkpoint_bytes", "message_bytes"),
    *("parameter_bytes", "gradient_bytes"),
)


def small_layers(**changes):
    return decoder_layers(SMALL.model_copy(update=changes))


def shape_of(family):
    """Return the changes of a tiny family's config by which some weight gradients are large enough to wait."""
    if family == "gpt2":
        return GPT2_SHAPE
    has_head_size = family in ("gemma", "gemma2", "gemma3", "qwen3", "qwen3_moe")
    return {**SHAPE, "head_dim": 16} if has_head_size else SHAPE


def reported(layers, split, *, schedule="zb-h1", loss=None, **options):
    """Return the bytes per layer that a pipeline reports in its third step, when its splits of backwards stay."""
    tokens = torch.randint(3, 500, (ROWS * MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(0))

    def case(transport):
        pipeline = ps.Pipeline(layers, schedule, MICROBATCHES, loss, transport=transport, split=split, **options)
        for _ in range(3):
            report = pipeline.memory_report(tokens, target=tokens)
            for parameter in pipeline.parameters():
                parameter.grad = None
        pipeline.close()
        return report

    return on_ranks(len(split), case, deadline_s=60)[0].layer_bytes


def differences(works, layer_bytes):
    """Return what a report says otherwise: field, its bytes, and those of the works."""
    return [
        (field, list(layer_bytes[field]), [getattr(work, field) for work in works])
        for field in FIELDS
        if list(layer_bytes[field]) != [getattr(work, field) for work in works]
    ]


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self, width=64, hidden=256):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


def plain_layers(num_blocks=2, width=64, vocabulary=512):
    """Return modules: a table of tokens, blocks, and a head."""
    return [nn.Embedding(vocabulary, width), *(Block(width) for _ in range(num_blocks)), nn.Linear(width, vocabulary)]
