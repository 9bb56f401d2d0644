"""Tables of settings: the smallest valid one, with changes, and what is refused of one."""

import pytest

from penstock.errors import ConfigError
from penstock.train.settings.config import config_from_table

MINIMAL = {"run": {"folder": "runs/x"}, "data": {"corpus": "stdlib"}}


def table_with(**sections):
    return {name: {**MINIMAL.get(name, {}), **sections.get(name, {})} for name in {**MINIMAL, **sections}}


def refusal_of(table):
    with pytest.raises(ConfigError) as caught:
        config_from_table(table)
    return caught.value
