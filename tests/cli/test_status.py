"""Which error ends with which exit status, and what is printed about it."""

import re

import pytest
import torch

from penstock.cli.status import MEANINGS, ExitStatus, message_of, status_of
from penstock.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
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
        (CheckpointError("x"), 6),
        (NotSaved("x"), 1),
        (PipelineError("x"), 4),
        (PeerLost("x"), 4),
        (DeadlineExceeded("x"), 5),
        (NotFinite("x"), 7),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), 1),
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


def test_a_message_is_plain_unless_it_is_a_bug_and_the_page_of_exit_codes_lists_every_one():
    page = (ROOT / "docs" / "reference" / "exit_codes.md").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == {*ExitStatus, 6}
    assert set(MEANINGS) == set(ExitStatus)
    assert message_of(ConfigError("is wrong", key="a.b")) == "a.b: is wrong"
    assert message_of(PermissionError(13, "Permission denied", "file")) == "file: Permission denied"
    assert "bug" not in message_of(MemoryError("of the machine"))
    text = message_of(FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"))
    assert text.startswith("no temporary file can be written (No usable temporary directory found in ['/tmp']). Raise")
    assert "ulimit -f" in text
    assert "ValueError: x\n\nThis is a bug in Penstock" in message_of(ValueError("x"))


def test_a_limit_of_the_system_is_named_with_the_command_that_raises_it():
    with pytest.raises(MemoryError) as failed:
        _ = bytearray(2**62)

    pattern = r"no memory is left at .*test_status.py:\d+\. Raise the limit \(ulimit -v\), .*"
    assert re.fullmatch(pattern, message_of(failed.value))
    assert message_of(OSError(24, "Too many open files", "file")) == (
        "file: Too many open files. Raise the limit of open files (ulimit -n)"
    )
    assert message_of(OSError(27, "File too large", "file")).startswith(
        "file: File too large. Raise the limit of file sizes (ulimit -f), or"
    )
