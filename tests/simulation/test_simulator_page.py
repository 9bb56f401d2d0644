"""The examples of docs/simulator.md run, and its table of keys and units is complete."""

import re
from dataclasses import fields
from pathlib import Path

from penstock.show.idle import NAME_OF_CAUSE
from penstock.simulation import Costs
from penstock.simulation.causes import Cause
from penstock.simulation.costs.file import costs_from_toml
from penstock.simulation.costs.units import UNITS

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_the_example_of_a_file_sets_every_cost_but_the_derived_one():
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

    costs = costs_from_toml(example)

    unset = [each.name for each in fields(Costs) if getattr(costs, each.name) == each.default]
    assert unset == ["backward_s"]


def test_the_python_runs():
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(example, "simulator.md", "exec"), {})


def test_every_unit_and_every_cause_is_named():
    names = [unit for units in UNITS.values() for unit in units]

    assert [unit for unit in names if f"`{unit}`" not in PAGE] == []
    assert [cause.name for cause in Cause if f"| {NAME_OF_CAUSE[cause]} |" not in PAGE] == []
