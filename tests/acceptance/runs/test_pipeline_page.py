"""The script of docs/pipeline.md and its examples run on several ranks; the tables of the reference are complete."""

import inspect
import re
from dataclasses import MISSING, fields

import pytest
import torch
from torch import nn

from penstock.execute.losses.results import StepResult
from penstock.execute.options import PipelineOptions
from penstock.pipeline import Pipeline
from tests.house.source import ROOT
from tests.support.pages import blocks_of
from tests.support.ranks import run_ranks
from tests.support.reference import reference_step

PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference" / "pipeline.md").read_text(encoding="utf-8")
SCRIPT = blocks_of(PAGE)[0].text
MAX_LINES = 150
"""Of the page that shows how to use a pipeline; all rules are in the reference."""
MIXED_PRECISION, *DATA_PARALLEL = (
    (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") for name in ("mixed_precision", "replicas", "ddp")
)


def run_block(rank, code):
    """Run a script as a rank of the pool, whose default group it must leave to the pool."""
    found = {}
    exec(compile(re.sub(r"\S*destroy_process_group\(\)", "", code), "docs/pipeline.md", "exec"), found)
    return found


def history_of(rank, script):
    return run_block(rank, script)["history"]


def gradients_of_replica(rank, code):
    found = run_block(rank, code)
    return {name.replace("module.", ""): parameter.grad for name, parameter in found["pipeline"].named_parameters()}


@pytest.mark.slow
def test_the_full_script_gives_the_same_bits_on_two_ranks_as_on_one(two_ranks):
    (expected,) = run_ranks(1, history_of, SCRIPT)

    assert two_ranks.run(history_of, SCRIPT) == [expected] * 2
    assert expected[-1] < expected[0]


@pytest.mark.slow
def test_mixed_precision_gives_the_same_bits_and_scales_on_several_ranks_as_on_one(two_ranks, four_ranks):
    (expected,) = run_ranks(1, history_of, MIXED_PRECISION)

    assert two_ranks.run(history_of, MIXED_PRECISION) == [expected] * 2
    assert four_ranks.run(history_of, MIXED_PRECISION) == [expected] * 4
    losses, scales = zip(*expected, strict=True)
    assert losses[-1] < losses[0]
    assert len(set(scales)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("code", DATA_PARALLEL, ids=["reduce_stage", "ddp"])
def test_two_replicas_of_a_pipeline_have_the_gradients_of_the_whole_batch(four_ranks, code):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    inputs, target = torch.randn(32, 16), torch.rand(32, 16)
    reference_step(layers, (inputs,), {}, target, loss=nn.functional.mse_loss, num_microbatches=8)
    expected = dict(nn.ModuleList(layers).named_parameters())

    found = four_ranks.run(gradients_of_replica, code)

    assert {name for gradients in found for name in gradients} == set(expected)
    for gradients in found:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-5, atol=1e-7)


class Detached(nn.Module):
    def forward(self, features):
        return features.detach() * self.scale

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(("split", "expected"), [([1, 1, 1, 1], [0.0, 0.0]), ([1, 2, 1, 1], [0.0, None])])
def test_before_a_detached_value_gradients_are_zero_but_in_the_stage_that_detaches(split, expected):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Detached(), nn.Linear(4, 4), nn.Linear(4, 4)][: sum(split)]
    pipeline = Pipeline(layers, "interleaved-1f1b", 2, nn.functional.mse_loss, stages_per_rank=4, split=split)

    pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 4))

    gradients = [layer.weight.grad for layer in layers[:2]]
    assert [gradient if gradient is None else gradient.abs().max().item() for gradient in gradients] == expected
    assert layers[2].scale.grad.abs().max() > 0


def test_the_page_that_shows_the_use_is_short():
    assert len(PAGE.splitlines()) <= MAX_LINES


def test_the_table_has_every_keyword_with_its_default():
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| `([^|]*)` \| [^|]+ \|$", REFERENCE.partition("## All keywords")[2], re.MULTILINE
    )
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(Pipeline.__init__).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name not in ("self", "layers")
    }
    for option in fields(PipelineOptions):
        given[option.name] = option.default if option.default is not MISSING else option.default_factory

    shown = {name: f"{value.__name__}()" if isinstance(value, type) else repr(value) for name, value in given.items()}

    assert dict(rows) == shown
    assert len(rows) == len(shown)


def test_everything_that_the_result_has_is_told():
    table = REFERENCE.partition("## Result")[2].partition("## Gradients")[0]

    assert [field.name for field in fields(StepResult) if f"`{field.name}`" not in table] == []
