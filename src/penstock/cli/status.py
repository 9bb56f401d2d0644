"""The exit statuses that scripts may rely on, and which error ends with which."""

from enum import IntEnum

from penstock.errors import DeadlineExceeded, PenstockError, PipelineError


class ExitStatus(IntEnum):
    """What a command ends with."""

    FINE = 0
    WRONG_INPUT = 1
    USAGE = 2
    RANK_FAILED = 4
    HANG_ENDED = 5
    INTERRUPTED = 130


def status_of(error: BaseException) -> ExitStatus:
    """Return the exit status of a command or rank that ended with `error`."""
    match error:
        case KeyboardInterrupt() | BrokenPipeError():
            return ExitStatus.INTERRUPTED
        case DeadlineExceeded():
            return ExitStatus.HANG_ENDED
        case PipelineError():
            return ExitStatus.RANK_FAILED
        case PenstockError():
            return ExitStatus.WRONG_INPUT
        case _:
            return ExitStatus.RANK_FAILED
