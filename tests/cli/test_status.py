"""Which error ends with which exit status."""

import pytest

from penstock.cli.status import status_of
from penstock.errors import CheckpointError, ConfigError, DeadlineExceeded, FormatError, PeerLost, PipelineError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 1),
        (FormatError("x"), 1),
        (CheckpointError("x"), 1),
        (PipelineError("x"), 4),
        (PeerLost("x"), 4),
        (DeadlineExceeded("x"), 5),
        (ValueError("x"), 4),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 130),
    ],
)
def test_every_error_has_its_status(error, status):
    assert status_of(error) == status
