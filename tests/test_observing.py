"""What docs/observing.md shows runs as it stands, one block after the other, and its options exist."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest

from penstock.execute.options import DEBUG_LEVELS, PipelineOptions
from penstock.train.sections import DebugSection
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_python_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    # A process of its own: logging is set up for good there.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=180, check=False
    )

    assert len(blocks) == 4
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0 1 \d+ \[\d+\]$", done.stdout, re.MULTILINE)
    assert "INFO:penstock:rank 0 of 1: dualpipe-v, 4 microbatches" in done.stderr


def test_the_options_and_levels_of_the_page_exist():
    options = {option.name for option in fields(PipelineOptions)}
    keys = set(re.findall(r"`debug\.(\w+) ?=", PAGE))

    assert {"ranges", "debug", "overlap", "run_ahead"} <= options
    assert keys == {"ranges", "log", "level"} == set(DebugSection.model_fields)
    assert DebugSection.model_fields["level"].annotation.__args__ == DEBUG_LEVELS
