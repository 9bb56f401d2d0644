"""The options and levels that docs/observing.md names exist."""

import re
from dataclasses import fields

from penstock.execute.options import DEBUG_LEVELS, PipelineOptions
from penstock.train.settings.sections import DebugSection
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")


def test_the_options_and_levels_of_the_page_exist():
    options = {option.name for option in fields(PipelineOptions)}
    keys = set(re.findall(r"`debug\.(\w+) ?=", PAGE))

    assert {"ranges", "debug", "overlap", "run_ahead"} <= options
    assert keys == {"ranges", "log", "level", "norms", "copies_every", "one_stream"} == set(DebugSection.model_fields)
    assert DebugSection.model_fields["level"].annotation.__args__ == DEBUG_LEVELS
