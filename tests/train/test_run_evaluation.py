"""Evaluating a run in this process: which weights, which batches, and what is no number of tokens."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import ConfigError, NotFinite
from penstock.train.loop import train
from penstock.train.run_evaluation import evaluate_run
from penstock.train.settings.config import load_config
from tests.support.tiny_run import write_tiny_run

SOURCE = """
import torch


def batches(batch_size, length, split=None):
    seed = 1 if split == "train" else 2
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(256, (batch_size, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def batches_to_train_on(batch_size, length):
    yield from batches(batch_size, length, "train")


def layers(vocabulary, length, width=8):
    return [torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary)]


def loss(output, target):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()) / 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_tiny_run(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "texts").mkdir()
    for number in range(400):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} is a number. " * (1 + number % 3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_with(*overrides):
    """Train, and return the result with the configuration that evaluates its weights."""
    config = load_config("run.toml", ["run.steps=2", *overrides])
    result = train(config, output=StringIO())
    return result, config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"load": "run"})})


def evaluate(config, *, is_whole=False):
    return evaluate_run(config, StringIO(), is_whole=is_whole)


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("data.packing=none", "data.files=['texts']"), marks=pytest.mark.slow),
        pytest.param(("precision.compute=bfloat16", "data.packing=documents"), marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_the_run_bit_for_bit(folder, options):
    result, config = run_with("run.evaluate_batches=3", *options)

    found = evaluate(config)

    assert found.loss == result.held_out_loss
    assert (found.rank, found.step, found.num_batches) == (0, None, 3)


@pytest.mark.slow
def test_data_of_a_function_are_evaluated_and_a_loss_of_ones_own_has_no_perplexity(folder):
    text = Path("run.toml").read_text()
    decoder = text[text.index("[model]") : text.index("[data]")]
    Path("run.toml").write_text(text.replace(decoder, ""))
    own = ("data.source=own.py:batches", "data.files=[]", "model.source=own.py:layers", "model.loss=own.py:loss")
    result, config = run_with(*own, "run.evaluate_batches=2")

    found = evaluate(config)

    assert found.loss == result.held_out_loss
    assert (found.perplexity, found.num_batches, found.num_targets) == (None, 2, 128)


def test_a_function_without_a_held_out_part_needs_another_text(folder):
    _, config = run_with("data.source=own.py:batches_to_train_on", "data.files=[]")

    with pytest.raises(ConfigError, match=r"holds out nothing: own.py:batches_to_train_on takes no parameter `split`"):
        evaluate(config)


def test_weights_that_are_not_finite_are_named(folder):
    _, config = run_with()
    weights = load_file("run/weights.safetensors")
    save_file({name: torch.full_like(each, torch.nan) for name, each in weights.items()}, "run/weights.safetensors")

    with pytest.raises(NotFinite, match=r"run/weights.safetensors: the loss is nan; expected a finite number"):
        evaluate(config)
