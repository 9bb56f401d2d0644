"""The examples of docs/simulator.md run, and its tables of keys and units are complete."""

import re
from dataclasses import fields
from pathlib import Path

from penstock.simulation import Costs, LayerCosts
from penstock.simulation.causes import NAME_OF_CAUSE, Cause
from penstock.simulation.costs.file import FIELD_OF_KEY, costs_from_toml
from penstock.simulation.costs.units import UNITS

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
TOML, PYTHON = (re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) for language in ("toml", "python"))


def test_the_example_of_a_file_sets_every_cost_but_the_derived_one():
    costs = costs_from_toml(TOML[0])

    unset = [each.name for each in fields(Costs) if getattr(costs, each.name) == each.default]
    assert unset == ["backward_s"]


def test_the_file_per_layer_is_the_python_above_it():
    assert isinstance(costs_from_toml(TOML[1]), LayerCosts)
    example = next(example for example in PYTHON if "LayerCosts(" in example)
    named = {}
    exec(compile(example, "simulator.md", "exec"), named)

    assert costs_from_toml(TOML[1]) == named["costs"]


def test_every_key_of_a_text_is_named():
    assert [key for key in FIELD_OF_KEY if f"`{key}`" not in PAGE] == []


def test_every_unit_and_every_cause_is_named():
    names = [unit for units in UNITS.values() for unit in units]

    assert [unit for unit in names if f"`{unit}`" not in PAGE] == []
    assert [cause.name for cause in Cause if f"| {NAME_OF_CAUSE[cause]} |" not in PAGE] == []
