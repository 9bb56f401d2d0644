"""The sections of the configuration."""

import tomllib

import pytest

from penstock.train.settings import sections
from penstock.train.settings.config import config_from_table, config_to_toml
from penstock.train.settings.section import Section, meaning_of
from tests.train.settings.tables import config_with

SECTIONS = [value for name, value in vars(sections).items() if name.endswith("Section") and value is not Section]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_meaning_on_one_line(section):
    meanings = {key: meaning_of(field) for key, field in section.model_fields.items()}

    assert [key for key, meaning in meanings.items() if not meaning or "\n" in meaning] == []


def test_there_is_one_replica_unless_more_are_asked_for_and_what_is_written_reads_back():
    parallel = {"data": 4, "shard": "full", "residency": 0, "look_ahead": 0, "gradients": "mean"}
    one, four = config_with(), config_with(parallel=parallel, batch={"size": 32})

    assert dict(one.parallel) == {"data": 1, "shard": "none", "residency": 2, "look_ahead": 1, "gradients": "sum"}
    assert (one.num_processes, four.num_processes) == (2, 8)
    assert dict(four.parallel) == parallel
    assert config_from_table(tomllib.loads(config_to_toml(four))) == four
