"""Tables of settings: the smallest valid one, with changes, and what is refused of one."""

import pytest

from penstock.errors import ConfigError
from penstock.train.settings.config import config_from_table

MINIMAL = {"run": {"folder": "runs/x"}, "data": {"corpus": "stdlib"}}


def merged(table, sections):
    """Return a table with these sections, whose keys go before those of the table."""
    return table | {name: table.get(name, {}) | keys for name, keys in sections.items()}


def table_with(**sections):
    return merged(MINIMAL, sections)


def config_with(**sections):
    return config_from_table(table_with(**sections))


def refusal_of(table):
    with pytest.raises(ConfigError) as caught:
        config_from_table(table)
    return caught.value
