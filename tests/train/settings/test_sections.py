"""The sections of the configuration."""

import pytest
from pydantic import ValidationError

from penstock.train.settings import sections
from penstock.train.settings.sections import DataSection, PipelineSection, Section

SECTIONS = [value for name, value in vars(sections).items() if name.endswith("Section") and value is not Section]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_description(section):
    assert [key for key, field in section.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_is_refused(section):
    given = {"folder": "x"} if "folder" in section.model_fields else {}

    with pytest.raises(ValidationError, match="extra_forbidden"):
        section.model_validate({**given, "unknown": 1})


def test_a_section_is_frozen_and_its_lists_are_tuples():
    section = PipelineSection.model_validate({"split": [1, 2]})

    assert section.split == (1, 2)
    with pytest.raises(ValidationError, match="frozen"):
        section.ranks = 3


def test_only_the_list_itself_is_taken_leniently():
    with pytest.raises(ValidationError, match="valid string"):
        DataSection.model_validate({"files": [1]})
