"""Warnings point at the line of the user's code that they are about, not into Penstock."""

import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import penstock as ps
from penstock.errors import PenstockWarning
from tests.execute.stages.test_split_backward import Custom
from tests.support.local_pipelines import WIDTH, on_ranks

INPUTS, TARGET = torch.ones(8, 4), torch.zeros(8, 4)


@contextmanager
def pointing_at(text):
    """All warnings of Penstock within point at the one line of this file that holds `text`, behind a comment sign."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [each for each in caught if issubclass(each.category, PenstockWarning)]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (expected,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    assert {(each.filename, each.lineno) for each in found} == {(__file__, expected)}


def layers(number=4):
    return [nn.Linear(4, 4) for _ in range(number)]


def make(number=4, **options):
    return ps.Pipeline(layers(number), "1f1b", options.pop("microbatches", 4), nn.functional.mse_loss, **options)


def test_of_a_pipeline():
    def case(wires):
        ps.Pipeline(layers(), "1f1b", 1, nn.functional.mse_loss, transport=wires).close()  # plain

    with pointing_at("plain"):
        on_ranks(2, case)


def test_of_a_pipeline_in_a_with_statement():
    def case(wires):
        with ps.Pipeline(layers(), "1f1b", 1, nn.functional.mse_loss, transport=wires):  # with
            pass

    with pointing_at("with"):
        on_ranks(2, case)


def test_of_a_pipeline_that_an_adapter_makes():
    from penstock.moving.deepspeed import PipelineModule, initialize

    def case(wires):
        module = PipelineModule(layers(), loss_fn=nn.functional.mse_loss)
        engine = initialize(module, transport=wires)  # adapter
        engine.close()

    with pointing_at("adapter"):
        on_ranks(2, case)


def test_of_a_step_whose_weight_gradients_cannot_wait():
    pipeline = ps.Pipeline([nn.Sequential(Custom())] * 1, "zb-h1", 2, nn.functional.mse_loss)

    with pointing_at("split"):
        pipeline.step(torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH))  # split


def test_of_a_stream_that_is_late():
    pipeline = make(data_warn_s=1e-9)
    batches = [(INPUTS[:2], TARGET[:2])] * 4

    with pointing_at("stream"):
        pipeline.step(ps.Stream(iter(batches)))  # stream


def test_of_a_checkpoint_that_is_damaged(tmp_path):
    pipeline = make()
    for step in (1, 2):
        ps.save_checkpoint(tmp_path, pipeline, step=step)
    next((tmp_path / "step-2").glob("*.json")).unlink()

    with pointing_at("checkpoint"):
        ps.load_checkpoint(tmp_path, pipeline)  # checkpoint
