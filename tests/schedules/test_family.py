"""Families: options, their defaults and refusals."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import FAMILIES


def test_options_that_are_not_given_have_their_default():
    assert FAMILIES["1f1b"].resolve_options({}) == {"warmup": "standard"}


def test_options_that_are_given_replace_the_default():
    assert FAMILIES["1f1b"].resolve_options({"warmup": "eager"}) == {"warmup": "eager"}


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"warmpu: 1f1b has no option .* Did you mean 'warmup'\?"):
        FAMILIES["1f1b"].resolve_options({"warmpu": "eager"})


def test_a_family_without_options_says_so():
    with pytest.raises(ConfigError, match="its options: none"):
        FAMILIES["sequential"].resolve_options({"warmup": "eager"})


def test_a_value_that_is_no_choice_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="warmup: 'late' is not a value of it; choose standard or eager") as caught:
        FAMILIES["1f1b"].resolve_options({"warmup": "late"})

    assert caught.value.key == "warmup"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_defaults_are_among_the_choices_and_every_field_says_something(family):
    assert all(option.default in option.choices and option.help for option in family.options.values())
    assert all((family.summary, family.source, family.placement, family.restrictions, family.bubble, family.memory))
    assert family.advice
