"""The base of the sections of a configuration."""

import pytest
from pydantic import Field, ValidationError

from penstock.train.settings.section import Scalar, Section, Texts, meaning_of


class Example(Section):
    """A section."""

    names: Texts = ()
    """names of
    some things"""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """options"""


def test_a_text_is_a_list_of_one_and_a_section_is_frozen():
    example = Example(names="a", options={"b": 1})

    assert (example.names, Example(names=["a", "b"]).names) == (("a",), ("a", "b"))
    with pytest.raises(ValidationError, match="frozen"):
        example.names = ("c",)


@pytest.mark.parametrize("values", [{"name": "a"}, {"names": [1]}, {"names": [""]}, {"options": {"b": float("inf")}}])
def test_unknown_keys_other_types_and_numbers_that_are_not_finite_are_refused(values):
    with pytest.raises(ValidationError):
        Example(**values)


def test_the_meaning_of_a_key_is_the_text_below_it_on_one_line():
    assert meaning_of(Example.model_fields["names"]) == "names of some things"
