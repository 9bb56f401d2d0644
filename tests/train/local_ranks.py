"""Ranks as threads of the test's process, a small language model to train on them, and a request to stop."""

from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.execute.transport import LocalTransport
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.train.stopping import StopRequest

MAX_WAIT_S = 20.0
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


def on_ranks(num_ranks, case, *args):
    """Return what `case(transport, *args)` returned on every rank; an error of any rank is raised, the first first."""
    with ThreadPoolExecutor(num_ranks) as threads:
        transports = LocalTransport.create(num_ranks, MAX_WAIT_S)
        futures = [threads.submit(case, transport, *args) for transport in transports]
    return [future.result() for future in futures]


def error_of(case, *args):
    """Return what a call raises."""
    try:
        case(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


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


def random_batch(seed, size=8, length=8):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
