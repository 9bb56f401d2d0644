"""`penstock profile`: what its ranks are told, what is written, and what is refused."""

import sys
from pathlib import Path

import pytest

from penstock.cli import launch
from penstock.cli.entry import main
from penstock.simulation.costs.file import read_costs
from tests.support.tiny_run import files_below, fork, settings, write_tiny_run

PENSTOCK = ("-m", "penstock")


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_tiny_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "run.toml"


def test_ranks_are_told_the_same_command(run_file, monkeypatch):
    launches = []
    monkeypatch.setattr(launch, "launch_ranks", lambda command, **rest: launches.append((command, rest)))

    arguments = ["--steps", "3", "--output", "mine.toml", "--set", "pipeline.ranks=2"]
    assert main(["profile", run_file, *arguments]) == 0

    [(command, rest)] = launches
    assert command[0] == sys.executable
    settings = ["--set=pipeline.ranks=2", '--set=run.folder="run"']
    assert command[-8:] == ["penstock", "profile", "--steps=3", "--output=mine.toml", *settings, "--", run_file]
    assert rest == {"num_ranks": 2, "port": 0, "may_stop": False}


def test_one_rank_is_profiled_in_this_process(run_file, printed, refused):
    assert "--steps: 0 steps; record 1 or more" in refused("profile", run_file, "--steps", "0")
    text = printed("profile", run_file, "--steps", "1")
    assert text.startswith("1f1b, 1 recorded step, split 5\n")
    assert "costs written to run/costs.toml: penstock compare NAME ... --costs run/costs.toml\n" in text
    costs = read_costs(Path("run/costs.toml"))
    assert sum(costs.forward) > 0
    assert costs.split == (costs.num_layers,)


@pytest.mark.slow
def test_two_ranks_write_costs_that_other_commands_read(tmp_path):
    write_tiny_run(tmp_path)

    process = fork([*PENSTOCK, "profile", "run.toml", *settings("pipeline.ranks=2"), "--output", "mine.toml"], tmp_path)
    printed, complained = process.communicate(timeout=100)

    assert (process.returncode, complained) == (0, "")
    assert "0 to 1" in printed
    assert printed.count("costs written to mine.toml") == 1
    assert "bottleneck" in printed
    costs = read_costs(tmp_path / "mine.toml")
    assert len(costs.forward) == len(costs.backward) == costs.num_layers == sum(costs.split)
    assert len(costs.split) == 2
    assert min(costs.message_bytes) > 0
    command = [*PENSTOCK, "compare", "1f1b", "zbv", "--ranks", "1", "--microbatches", "5", "--costs", "mine.toml"]
    compared = fork(command, tmp_path)
    assert compared.communicate(timeout=100)[1] == ""
    assert not {"run/weights.safetensors", "run/config.toml", "run/costs.toml"} & files_below(tmp_path)
