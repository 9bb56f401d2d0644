"""The sections of the configuration."""

import tomllib

import pytest
from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.train.settings import sections
from penstock.train.settings.config import config_from_table, config_to_toml
from penstock.train.settings.sections import DataSection, PipelineSection, Section, meaning_of
from tests.train.settings.tables import MINIMAL

SECTIONS = [value for name, value in vars(sections).items() if name.endswith("Section") and value is not Section]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_meaning_on_one_line(section):
    meanings = {key: meaning_of(field) for key, field in section.model_fields.items()}

    assert [key for key, meaning in meanings.items() if not meaning or "\n" in meaning] == []


def test_a_section_is_frozen_and_its_lists_are_tuples():
    section = PipelineSection.model_validate({"split": [1, 2]})

    assert section.split == (1, 2)
    with pytest.raises(ValidationError, match="frozen"):
        section.ranks = 3


def test_only_the_list_itself_is_taken_leniently():
    with pytest.raises(ValidationError, match="valid string"):
        DataSection.model_validate({"files": [1]})


def test_there_is_one_replica_unless_more_are_asked_for():
    config = config_from_table(MINIMAL)

    assert dict(config.parallel) == {"data": 1, "shard": "none", "residency": 2, "look_ahead": 1}
    assert config.num_processes == 2
    assert config_from_table(MINIMAL | {"parallel": {"data": 4}, "batch": {"size": 32}}).num_processes == 8


def test_a_written_number_of_replicas_reads_back():
    parallel = {"data": 2, "shard": "full", "residency": 0, "look_ahead": 0}
    config = config_from_table(MINIMAL | {"parallel": parallel})

    assert config_from_table(tomllib.loads(config_to_toml(config))) == config
    assert dict(config.parallel) == parallel


@pytest.mark.feature("X49")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data": 0}, "parallel.data: got 0, expected greater than or equal to 1"),
        ({"shard": "fll"}, "parallel.shard: got 'fll', expected 'none', 'optimizer' or 'full' .* Did you mean 'full'?"),
        ({"replicas": 2}, r"parallel.replicas: unknown key. Known here: data, shard, residency, look_ahead"),
    ],
)
def test_a_wrong_value_of_parallel_is_named_with_what_is_expected(settings, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        config_from_table(MINIMAL | {"parallel": settings})
