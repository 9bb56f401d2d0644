"""Which error ends with which exit status, and what is printed about it."""

import re

import pytest
import torch

from penstock.cli.status import MEANINGS, ExitStatus, message_of, status_of
from penstock.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    FormatError,
    NotFinite,
    NotSaved,
    PeerLost,
    PipelineError,
)
from tests.house.source import ROOT


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 1),
        (FormatError("x"), 1),
        (CheckpointError("x"), 6),
        (NotSaved("x"), 1),
        (PipelineError("x"), 4),
        (PeerLost("x"), 4),
        (DeadlineExceeded("x"), 5),
        (NotFinite("x"), 7),
        (PermissionError(13, "Permission denied", "file"), 1),
        (OSError(5, "no name"), 70),
        (MemoryError(), 4),
        (torch.OutOfMemoryError("x"), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4),
        (ValueError("x"), 70),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 130),
    ],
)
def test_every_error_has_its_status(error, status):
    assert status_of(error) == status


def test_a_message_is_plain_unless_it_is_a_bug():
    assert message_of(ConfigError("is wrong", key="a.b")) == "a.b: is wrong"
    assert message_of(PermissionError(13, "Permission denied", "file")) == "file: Permission denied"
    assert "bug" not in message_of(MemoryError("of the machine"))
    assert "ValueError: x\n\nThis is a bug in Penstock" in message_of(ValueError("x"))


def test_the_page_of_exit_codes_lists_every_one():
    page = (ROOT / "docs" / "reference" / "exit_codes.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}

    assert listed == {*ExitStatus, 6}
    assert set(MEANINGS) == set(ExitStatus)
