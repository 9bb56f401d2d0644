"""The section `[parallel]`."""

import tomllib

import pytest

from penstock.errors import ConfigError
from penstock.train.settings.config import config_from_table, config_to_toml

MINIMAL = {"run": {"folder": "runs/x"}, "data": {"corpus": "stdlib"}}


def test_there_is_one_replica_unless_more_are_asked_for():
    config = config_from_table(MINIMAL)

    assert dict(config.parallel) == {"data": 1, "shard": "none", "residency": 2, "look_ahead": 1}
    assert config.num_processes == 2
    assert config_from_table(MINIMAL | {"parallel": {"data": 4}, "batch": {"size": 32}}).num_processes == 8


def test_a_written_configuration_reads_back():
    parallel = {"data": 2, "shard": "full", "residency": 0, "look_ahead": 0}
    config = config_from_table(MINIMAL | {"parallel": parallel})

    assert config_from_table(tomllib.loads(config_to_toml(config))) == config
    assert dict(config.parallel) == parallel


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data": 0}, "parallel.data: got 0, expected greater than or equal to 1"),
        ({"shard": "fll"}, "parallel.shard: got 'fll', expected 'none', 'optimizer' or 'full' .* Did you mean 'full'?"),
        ({"residency": -1}, "parallel.residency: got -1, expected greater than or equal to 0"),
        ({"look_ahead": -1}, "parallel.look_ahead: got -1, expected greater than or equal to 0"),
        ({"replicas": 2}, r"parallel.replicas: unknown key. Known here: data, shard, residency, look_ahead"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(settings, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        config_from_table(MINIMAL | {"parallel": settings})
