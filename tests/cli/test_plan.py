"""`penstock plan`."""

import json
from dataclasses import replace

import pytest

import penstock as ps
from penstock.cli.entry import main
from penstock.cli.plan import EXPORTS
from penstock.run_planning.exports import SETTINGS
from penstock.train.settings.config import load_config
from penstock.train.setup import build_plan
from tests.run_planning.cases import write_run

SIZE = ["--gpus", "4", "--memory", "1MiB", "--sequence-length", "32", "--global-batch", "16", "--seconds", "0"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The arguments of a plan of the tiny run, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    run_file, costs_file = write_run(tmp_path)
    return ["plan", str(run_file), "--costs", str(costs_file), *SIZE]


def test_the_command_takes_the_trainers_that_it_exports_to():
    assert tuple(SETTINGS) == EXPORTS


@pytest.mark.feature("X44")
def test_the_run_file_is_one_that_train_takes(command, printed, tmp_path):
    text = printed(*command, "-o", "run.toml")

    config = load_config(tmp_path / "run.toml")
    assert text.startswith("fits: yes; ")
    assert text.rstrip().endswith("run.toml is written; next: penstock train run.toml")
    assert config.num_processes == 4
    assert build_plan(config).num_microbatches == config.pipeline.microbatches


def test_a_searched_schedule_lies_beside_the_run_file(command, tmp_path, monkeypatch):
    """What a search finds is replaced here by a schedule that has no family."""
    from penstock.searching.layouts import choosing

    evaluate = choosing.best_of_families

    def without_family(problem, below_s):
        plan = evaluate(problem, below_s)
        return plan and replace(plan, family="")

    defaults = choosing.choose_layouts.__kwdefaults__ | {"evaluate": without_family}
    monkeypatch.setattr(choosing.choose_layouts, "__kwdefaults__", defaults)
    assert main([*command, "-o", "run.toml"]) == 0

    config = load_config(tmp_path / "run.toml")
    assert config.pipeline.schedule == "run.schedule.json"
    assert ps.Schedule.from_json((tmp_path / "run.schedule.json").read_text()) == build_plan(config)


def test_json_is_alone_on_standard_output(command, printed):
    document = json.loads(printed(*command, "--to", "json", "-o", "run.toml"))

    assert document["fits"] is True


def test_an_export_writes_its_folder(command, printed, tmp_path):
    text = printed(*command, "--export", "torchtitan", "out")

    assert (tmp_path / "out" / "schedule.csv").read_text().startswith("0F0")
    assert (tmp_path / "out" / "settings.toml").is_file()
    assert "written for torchtitan: out/" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-o", "run.txt"], "run.txt does not end in .toml, as a run file; give such a name"),
        (["-o", "base.toml"], "base.toml exists; give another name, or --force to replace it"),
        (["--export", "megatron", "out"], "megatron is unknown; known: torchtitan, automodel"),
        (["--export", "automodel", "base.toml"], "base.toml is not a folder; give another name"),
        (["--export", "automodel", "."], ". is not empty; give another name, or --force to replace files"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_planned(more, message, command, refused):
    assert message in refused(*command, *more)
