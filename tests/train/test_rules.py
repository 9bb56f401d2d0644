"""Rules between settings."""

import pytest

from penstock.errors import ConfigError
from penstock.train.config import config_from_table

MINIMAL = {"run": {"folder": "runs/x"}, "data": {"corpus": "stdlib"}}


def table_with(**sections):
    return {name: {**MINIMAL.get(name, {}), **sections.get(name, {})} for name in {**MINIMAL, **sections}}


def refusal_of(table):
    with pytest.raises(ConfigError) as caught:
        config_from_table(table)
    return caught.value


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"batch": {"size": 18}}, "batch.size", "use 16 or 20, or set batch.allow_ragged"),
        ({"batch": {"size": 3, "allow_ragged": True}}, "batch.size", "at least one sequence per microbatch"),
        ({"model": {"heads": 3, "key_value_heads": 3}}, "model.heads", "do not divide model.width = 160"),
        ({"model": {"width": 12, "heads": 4}}, "model.heads", "must be even"),
        ({"model": {"key_value_heads": 3}}, "model.key_value_heads", "does not divide model.heads = 4"),
        ({"model": {"length": 64}}, "batch.length", "more than model.length = 64"),
        ({"model": {"vocabulary": 100}}, "model.vocabulary", "too small for bytes"),
        ({"data": {"corpus": "files"}}, "data.files", "no file or folder is named"),
        ({"data": {"files": ["a"]}}, "data.files", "drop one of the two"),
        ({"data": {"suffixes": []}}, "data.suffixes", "is empty"),
        ({"data": {"held_out_fraction": 0}}, "data.held_out_fraction", "nothing to evaluate on"),
        ({"pipeline": {"split": []}}, "pipeline.split", "is empty"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(sections, key, message):
    error = refusal_of(table_with(**sections))

    assert error.key == key
    assert message in str(error)


def test_a_ragged_batch_is_allowed_on_request():
    config = config_from_table(table_with(batch={"size": 18, "allow_ragged": True}))

    assert config.batch.size == 18


def test_all_contradictions_come_at_once():
    error = refusal_of(table_with(batch={"size": 18}, model={"heads": 3, "key_value_heads": 3}, pipeline={"split": []}))

    assert str(error).startswith("3 settings cannot be used:")
    assert error.key == ""
