"""What a command line says about the schedule it wants."""

import pytest

from penstock.cli.wanted import parse_options
from penstock.errors import ConfigError


def test_options_are_read_as_text_with_dashes_as_underscores():
    assert parse_options(["backward-order = descending", "depth=2"]) == {"backward_order": "descending", "depth": "2"}


@pytest.mark.parametrize("texts", [["a=1", "a=2"], ["=1"], ["1a=2"], ["a"]])
def test_malformed_options_are_refused(texts):
    with pytest.raises(ConfigError):
        parse_options(texts)
