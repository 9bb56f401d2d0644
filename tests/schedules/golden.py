"""The recorded orders of other systems, and the same schedules built here."""

import json
import re
from functools import cache
from pathlib import Path

from penstock.schedules import build

FOLDER = Path(__file__).parents[1] / "data" / "golden"


@cache
def cases(system):
    """Every case of a system by its key: a list of orders, or an object that holds one."""
    return json.loads((FOLDER / f"{system}.json").read_text(encoding="utf-8"))["cases"]


def orders_of(case):
    """One text per rank, the actions in torch's notation."""
    if isinstance(case, list):
        return case
    return case["orders"] if "orders" in case else [_from_steps(rank, text) for rank, text in enumerate(case["micro"])]


def recorded(system, prefix):
    """(key, orders) of all cases of a system whose key starts so; an unknown prefix is an error."""
    found = [(key, orders_of(case)) for key, case in cases(system).items() if key.startswith(prefix)]
    assert found
    return found


def assert_recorded(name, system, prefix, options=lambda size: {}):
    """Compare the orders of a family with all that a system recorded; `options` takes the numbers in a key."""
    for key, expected in recorded(system, prefix):
        assert built(name, key, **options(sizes(key))) == expected, key


def sizes(key):
    """The numbers in a key by their letters: `x/p4/v2/m8/group3` is {p: 4, v: 2, m: 8, group: 3}."""
    return {letters: int(number) for letters, number in re.findall(r"(?<=/)([a-zA-Z]+)(\d+)(?=/|$)", key)}


def built(name, key, **options):
    """The orders of a family at the size that a key names: `p4` or `s4` ranks, `m8` microbatches, `v2` or `vpp2`."""
    found = sizes(key)
    per_rank = found.get("v", found.get("vpp"))
    ranks = found["p"] if "p" in found else found["s"]
    return orders(build(name, ranks=ranks, microbatches=found["m"], stages_per_rank=per_rank, **options))


def orders(schedule):
    """The orders of a schedule as recorded orders are written."""
    return [" ".join(map(str, order)) for order in schedule]


def _from_steps(stage, text):
    """DeepSpeed's steps `f0 . b0` as actions."""
    return " ".join(f"{stage}{step[0].upper()}{step[1:]}" for step in text.split() if step != ".")
