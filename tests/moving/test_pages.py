"""Every page of docs/moving has one full example; it runs on two processes and trains as one process does."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from penstock.moving.torch_pipelining import FAMILY_OF_CLASS
from penstock.pipeline import Pipeline
from penstock.schedules import FAMILIES
from tests.support.pages import run_page
from tests.support.ranks import RankPool

FOLDER = Path(__file__).parents[2] / "docs" / "moving"
SYSTEMS = ["torch-pipelining", "megatron", "deepspeed", "torchtitan"]
PAGES = [*SYSTEMS, "dualpipe"]
EXAMPLE = "## A full example"
OURS, TORCHS = "from penstock.moving.torch_pipelining import", "from torch.distributed.pipelining import"


def page(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def example(name):
    (code,) = re.findall(r"```python\n(.*?)```", page(name).partition(EXAMPLE)[2], re.DOTALL)
    return code


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_blocks_before_the_example_print_what_they_show(name, tmp_path):
    blocks = page(name).partition(EXAMPLE)[0]

    assert run_page(blocks, tmp_path) == blocks


def run_example(rank, code):
    """Return the losses that the example kept."""
    found = {}
    exec(compile(code, "example", "exec"), found)
    return found["history"]


@pytest.fixture(scope="module")
def alone():
    with RankPool(1) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_the_example_trains_on_two_processes_as_on_one(alone, two_ranks, name):
    (expected,) = alone.run(run_example, example(name), timeout_s=110.0)

    found = [history for history in two_ranks.run(run_example, example(name), timeout_s=110.0) if history]

    assert expected[-1] < expected[0]
    for history in found:
        assert history == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_example_for_torch_gives_torchs_own_losses(two_ranks):
    assert OURS in example("torch-pipelining")

    ours = two_ranks.run(run_example, example("torch-pipelining"))
    torchs = two_ranks.run(run_example, example("torch-pipelining").replace(OURS, TORCHS))

    assert ours[1] == pytest.approx(torchs[1], rel=1e-6)


@pytest.mark.slow
def test_the_example_for_dualpipe_trains_as_that_for_torch_does_on_one_process(alone, two_ranks):
    """Both have one model and one batch, and two directions need two processes."""
    (expected,) = alone.run(run_example, example("torch-pipelining"), timeout_s=110.0)

    for history in two_ranks.run(run_example, example("dualpipe"), timeout_s=110.0):
        assert history == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_backward_of_ones_own_trains_as_autograds(two_ranks):
    for matches in two_ranks.run(run_own_backward, snippet_of_own_backward()):
        assert matches


@pytest.mark.slow
def test_the_replicas_train_to_the_loss_that_the_page_shows(tmp_path):
    section = page("README").partition("## Replicas")[2].partition("## True")[0]

    assert run_page(section, tmp_path) == section


def snippet_of_own_backward():
    (code,) = re.findall(r"```python\n(.*?)```", page("README").partition("## Replicas")[0], re.DOTALL)
    return code


def run_own_backward(rank, code):
    """Run the page's lines and compare the gradients that its layer gets on both ranks with autograd's."""
    found = {}
    exec(compile(code, "snippet", "exec"), found)
    layers = [*found["layers"], found["own_backward"](found["Scale"](16))]
    inputs = torch.linspace(-1, 1, 64).reshape(4, 16)
    pipeline = Pipeline(layers, "zb-h1", 2, loss=lambda output, target: (output**2).mean())
    pipeline.step(inputs)
    gradients = [parameter.grad for _, parameter in pipeline.named_parameters()]
    pipeline.close()
    return len(gradients) == 1 and torch.allclose(gradients[0], 2 * (inputs**2).sum(0) / 64)


def test_every_name_that_a_page_imports_exists():
    lines = re.findall(r"from penstock\.moving\.(\w+) import ([\w, ]+)", "".join(map(page, PAGES)))

    modules = {room: import_module(f"penstock.moving.{room}") for room, _ in lines}
    missing = [(room, name) for room, names in lines for name in names.split(", ") if not hasattr(modules[room], name)]
    assert len(lines) > len(SYSTEMS)
    assert missing == []


def test_the_table_of_schedules_names_all_of_torchs_and_only_families_that_exist():
    table = page("README").partition("## Schedules")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "there" not in line]

    theirs, ours = (set(re.findall(r"`([\w-]+)`", " ".join(column))) for column in zip(*rows, strict=True))

    assert set(FAMILY_OF_CLASS) <= theirs
    assert ours <= set(FAMILIES)
