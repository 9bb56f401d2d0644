"""The recorded orders of other systems, and the same schedules built here."""

import json
import re
from pathlib import Path

import pytest

from penstock.schedules import build

ORDERS = json.loads((Path(__file__).parents[1] / "data" / "orders.json").read_text(encoding="utf-8"))


def recorded(system, prefix):
    """Parameters (key, orders) of all cases of a system whose key starts so; an unknown prefix is an error."""
    cases = [pytest.param(key, ranks, id=key) for key, ranks in ORDERS[system].items() if key.startswith(prefix)]
    assert cases
    return cases


def built(name, key, **options):
    """The orders of a family at the size that a key names: `p4` or `s4` ranks, `m8` microbatches."""
    ranks, microbatches = re.search(r"/[ps](\d+)/m(\d+)$", key).groups()
    schedule = build(name, ranks=int(ranks), microbatches=int(microbatches), **options)
    return [" ".join(map(str, order)) for order in schedule]
