"""Every page of docs/moving has one full example; it runs on two processes and trains as one process does."""

import re
from pathlib import Path

import pytest

from penstock.moving import deepspeed, megatron, torch_pipelining, torchtitan
from penstock.moving.torch_pipelining import FAMILY_OF_CLASS
from penstock.schedules import FAMILIES
from tests.ranks import RankPool

FOLDER = Path(__file__).parents[2] / "docs" / "moving"
SYSTEMS = ["torch-pipelining", "megatron", "deepspeed", "torchtitan"]
OURS, TORCHS = "from penstock.moving.torch_pipelining import", "from torch.distributed.pipelining import"


def page(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def example(name):
    (code,) = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    return code


def run_example(rank, code):
    """Return the losses that the example kept."""
    found = {}
    exec(compile(code, "example", "exec"), found)
    return found["history"]


@pytest.fixture(scope="module")
def alone():
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def pair():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_the_example_trains_on_two_processes_as_on_one(alone, pair, name):
    (expected,) = alone.run(run_example, example(name), timeout_s=110.0)

    found = [history for history in pair.run(run_example, example(name), timeout_s=110.0) if history]

    assert expected[-1] < expected[0]
    for history in found:
        assert history == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_example_for_torch_gives_torchs_own_losses(pair):
    assert OURS in example("torch-pipelining")

    ours = pair.run(run_example, example("torch-pipelining"))
    torchs = pair.run(run_example, example("torch-pipelining").replace(OURS, TORCHS))

    assert ours[1] == pytest.approx(torchs[1], rel=1e-6)


@pytest.mark.parametrize("name", [*SYSTEMS, "README"])
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page(name))

    assert [link for link in links if not (FOLDER / link).exists()] == []


def test_every_name_that_a_page_imports_exists():
    modules = {
        "torch_pipelining": torch_pipelining,
        "megatron": megatron,
        "deepspeed": deepspeed,
        "torchtitan": torchtitan,
    }
    lines = re.findall(r"from penstock\.moving\.(\w+) import ([\w, ]+)", "".join(map(page, SYSTEMS)))

    missing = [(room, name) for room, names in lines for name in names.split(", ") if not hasattr(modules[room], name)]
    assert len(lines) > len(SYSTEMS)
    assert missing == []


def test_the_table_of_schedules_names_all_of_torchs_and_only_families_that_exist():
    table = page("README").partition("## Schedules")[2].partition("Orders were")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "there" not in line]

    theirs, ours = (set(re.findall(r"`([\w-]+)`", " ".join(column))) for column in zip(*rows, strict=True))

    assert set(FAMILY_OF_CLASS) <= theirs
    assert ours <= set(FAMILIES)
