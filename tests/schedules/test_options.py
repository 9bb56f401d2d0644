"""Options: their defaults, what they may be, and how their values are read."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules.options import Choice, Number, Options, flag

KNOWN = {
    "warmup": Choice("standard", ("standard", "eager"), "how to begin"),
    "group": Number("p", "microbatches in a row"),
    "overlap": flag("run both at once"),
}


def test_options_that_are_not_given_have_their_default():
    options = Options.read("toy", KNOWN, {})

    assert (options.word("warmup"), options.number("group", 4), options.is_on("overlap")) == ("standard", 4, False)


@pytest.mark.parametrize(
    "values", [{"warmup": "eager", "group": "3", "overlap": "true"}, {"group": 3, "overlap": True}]
)
def test_options_that_are_given_replace_the_default(values):
    options = Options.read("toy", KNOWN, values)

    assert (options.number("group", 4), options.is_on("overlap")) == (3, True)
    assert options.word("warmup") == values.get("warmup", "standard")


def test_a_value_that_is_no_choice_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="warmup: 'late' is not a value of it; choose standard or eager") as caught:
        Options.read("toy", KNOWN, {"warmup": "late"})

    assert caught.value.key == "warmup"


def test_a_choice_may_take_a_number_too():
    known = {"again": Choice("false", ("false", "true"), "run again", takes_number=True)}

    assert [Options.read("toy", known, {"again": value}).word("again") for value in (True, "3", 3)] == [
        "true",
        "3",
        "3",
    ]
    assert known["again"].values == "false or true or a number"
    for value, expected in (
        ("maybe", "choose false or true, or give a whole number of 1"),
        ("0", "give a whole number of"),
    ):
        with pytest.raises(ConfigError, match=rf"again: {value!r} is not a value of it; {expected}"):
            Options.read("toy", known, {"again": value})


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "", "²", "10000000000", True, None])
def test_a_value_that_is_no_whole_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"group: .* is not a value of it; give a whole number of 1 or more"):
        Options.read("toy", KNOWN, {"group": value})
