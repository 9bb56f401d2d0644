"""Ranks as threads of the test's process, a small language model to train on them, and a request to stop."""

import torch

from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.train.stopping import StopRequest
from tests.support.local_pipelines import on_ranks

VOCABULARY = 32


class Stopping(StopRequest):
    """Asks to stop after some steps."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    @property
    def is_requested(self):
        self.left -= 1
        return self.left <= 0


def small_layers(dtype="float32", tied_head=False, **options):
    config = DecoderConfig(
        vocabulary=VOCABULARY,
        width=16,
        layers=4,
        heads=2,
        key_value_heads=1,
        hidden=24,
        length=8,
        dtype=dtype,
        tied_head=tied_head,
    )
    return decoder_layers(config, **options)


def small_pipeline(transport, layers=None, **options):
    options = {"microbatches": 4, "loss": cross_entropy_loss} | options
    return Pipeline(layers or small_layers(), transport=transport, **options)


def on_small_pipelines(num_ranks, body, layers=None, **options):
    """Return what `body(pipeline)` returned on every rank, each with a small pipeline that is closed behind it."""

    def case(transport):
        with small_pipeline(transport, layers, **options) as pipeline:
            return body(pipeline)

    return on_ranks(num_ranks, case)


def random_batch(seed, size=8, length=8):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
