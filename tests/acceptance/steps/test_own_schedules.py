"""Schedules of one's own, from the example to training: by name, as a function, as a file."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.cli.entry import main
from tests.house.source import ROOT
from tests.support.grids import assert_grid
from tests.support.plug_ins import installing

EXAMPLE = ROOT / "examples" / "own_schedule.py"
LOSS = nn.MSELoss()


@pytest.fixture
def in_groups(tmp_path, monkeypatch):
    """The family of the example, installed."""
    with installing(tmp_path, monkeypatch) as install:
        install("own-schedule", ["in-groups = own_schedule:FAMILY"], own_schedule=EXAMPLE.read_text(encoding="utf-8"))
        yield


def trained(schedule, **options):
    """The loss and gradient after one step of a tiny model on one rank, and the schedule that ran."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    pipeline = ps.Pipeline([layer], schedule=schedule, loss=LOSS, **options)
    result = pipeline.step(torch.ones(4, 3), target=torch.zeros(4, 2))
    return result.loss.item(), layer.weight.grad.clone(), pipeline.schedule


@pytest.mark.usefixtures("in_groups")
def test_a_family_of_another_distribution_trains_by_its_name():
    loss, gradient, schedule = trained("in-groups", microbatches=4, size=2)
    known_loss, known_gradient, _ = trained("gpipe", microbatches=4)

    assert_grid(schedule, "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3")
    assert loss == known_loss
    assert torch.equal(gradient, known_gradient)


@pytest.mark.usefixtures("in_groups")
def test_such_a_family_is_shown_and_compared(capsys):
    assert main(["show", "in-groups:size=1", "--ranks", "2", "--microbatches", "2", "--to", "csv"]) == 0
    assert capsys.readouterr().out == "0F0,0B0,0F1,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    assert main(["compare", "in-groups", "--ranks", "2", "--microbatches", "2"]) == 0


@pytest.mark.feature("B17")
def test_a_function_makes_a_schedule_that_trains(tmp_path):
    def mine(ranks, microbatches):
        return [[f"{rank}{kind}{index}" for index in range(microbatches) for kind in "FB"] for rank in range(ranks)]

    schedule = ps.build(mine, ranks=1, microbatches=4)
    (tmp_path / "mine.csv").write_text(schedule.to_csv())

    by_value, by_file, known = trained(schedule), trained(tmp_path / "mine.csv"), trained("1f1b", microbatches=4)

    assert by_value[0] == by_file[0] == known[0]
    assert torch.equal(by_value[1], known[1])


@pytest.mark.slow
def test_the_example_runs():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)

    assert done.stdout == (
        "Timeline(predicted 'in_groups', makespan_s=60, bubble_fraction=0.6000) peak activations [2, 2, 2, 2]\n"
    )


@pytest.mark.slow
def test_the_commands_of_the_example_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = [line.split() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]

    assert [main(words[1:]) for words in lines if words[:1] == ["penstock"]] == [0, 0]
