"""Messages about very long input: they quote its beginning, and come at once."""

import json

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.ir.table import MAX_NAME_CHARACTERS
from penstock.placement import Placement
from penstock.simulation.costs.file import costs_from_json, costs_from_toml, load_costs
from penstock.train.settings.config import config_from_table, load_config
from penstock.train.settings.overrides import apply_overrides

LONG = "x" * 1_000_000
MOST = 1_600
RUN = {"run": {"folder": "runs/a"}, "data": {"corpus": "stdlib"}}

WRONG = {
    "routes": lambda: Placement.explicit(range(5000), [range(4999)]),
    "a route without stages": lambda: Placement.explicit(range(5000), [range(5000), []]),
    "ranks of stages": lambda: Placement.explicit(range(0, 10_000, 2)),
    "a section": lambda: config_from_table({**RUN, LONG: 1}),
    "a key": lambda: config_from_table({**RUN, "run": {LONG: 1}}),
    "an option's key": lambda: config_from_table({**RUN, "pipeline": {"options": {LONG: [1]}}}),
    "many keys": lambda: config_from_table({**RUN, "batch": {f"k{index}": 1 for index in range(500)}}),
    "a compiler": lambda: config_from_table({**RUN, "pipeline": {"compile": LONG}}),
    "an override": lambda: apply_overrides({}, [LONG]),
    "an override's key": lambda: config_from_table(apply_overrides(RUN, [f"{LONG}=1"])),
    "an override's value": lambda: apply_overrides({}, [f"run.steps=[{LONG}"]),
    "an override twice": lambda: apply_overrides({}, [f"run.folder={LONG}", "run.folder=b"]),
    "an override of a value": lambda: apply_overrides({"run": {"folder": LONG}}, ["run.folder.a=1"]),
    "a run file": lambda: load_config(LONG),
    "a schedule": lambda: ps.build(LONG, ranks=2, microbatches=2),
    "an option": lambda: ps.build("1f1b", ranks=2, microbatches=2, **{LONG: 1}),
    "an option's value": lambda: ps.build("1f1b", ranks=2, microbatches=2, warmup=LONG),
    "costs": lambda: load_costs(f"F=1,{LONG}"),
    "a cost's value": lambda: load_costs(f"F={LONG}"),
    "a cost's name": lambda: load_costs(f"{LONG}=1"),
    "a cost's key": lambda: costs_from_toml(f"{LONG} = 1"),
    "a key of a channel": lambda: costs_from_toml(f"[[channels]]\n{LONG} = 1"),
    "a cost twice": lambda: costs_from_json(f'{{"{LONG}": 1, "{LONG}": 2}}'),
    "a split": lambda: ps.LayerCosts(forward=[1, 2]).of_stages([0] * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_message_quotes_the_beginning_of_long_input(wrong):
    with pytest.raises(PenstockError) as caught:
        wrong()

    assert 20 < len(str(caught.value)) < MOST


def test_the_name_of_a_schedule_is_cut_where_it_is_long():
    document = json.loads(ps.build("1f1b", ranks=2, microbatches=2).to_json())
    orders = [document["ranks"][0][::-1], *document["ranks"][1:]]
    schedule = ps.Schedule.from_json(json.dumps({**document, "name": LONG, "ranks": orders}))

    assert schedule.name == f"{LONG[: MAX_NAME_CHARACTERS - 3]}..."
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(schedule)
    assert len(str(caught.value)) < MOST
