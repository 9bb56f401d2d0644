"""The exit statuses that scripts may rely on, which error ends with which, and what is printed about it."""

import traceback
from enum import IntEnum
from typing import TypeGuard

from penstock.errors import PenstockError, hint_of_limit


class ExitStatus(IntEnum):
    """A command ends with one of these numbers."""

    FINE = 0
    WRONG_INPUT = 1
    USAGE = 2
    RANK_FAILED = 4
    HANG_ENDED = 5
    NO_CHECKPOINT = 6
    NOT_FINITE = 7
    BUG = 70
    INTERRUPTED = 130


MEANINGS = {
    ExitStatus.FINE: "fine",
    ExitStatus.WRONG_INPUT: "wrong input",
    ExitStatus.USAGE: "wrong usage",
    ExitStatus.RANK_FAILED: "a rank failed",
    ExitStatus.HANG_ENDED: "a hang was ended",
    ExitStatus.NO_CHECKPOINT: "no valid checkpoint",
    ExitStatus.NOT_FINITE: "a loss or gradient norm is not finite",
    ExitStatus.BUG: "a bug in Penstock",
    ExitStatus.INTERRUPTED: "interrupted",
}
REPORT = (
    "This is a bug in Penstock, not a mistake of yours. Please report it with the text above, the command and its "
    "files, and the output of `penstock doctor --system`."
)


def status_of(error: BaseException) -> ExitStatus:
    """Return the exit status of a command or rank that ended with `error`."""
    match error:
        case KeyboardInterrupt() | BrokenPipeError():
            return ExitStatus.INTERRUPTED
        case PenstockError():
            return ExitStatus(error.exit_status)
        case OSError() if error.filename is not None or _has_no_temporary_folder(error):
            return ExitStatus.WRONG_INPUT
        case _:
            return ExitStatus.RANK_FAILED if _is_of_the_machine(error) else ExitStatus.BUG


def message_of(error: BaseException) -> str:
    """Return what is printed about an error: one message, and for a bug its traceback and how to report it."""
    if isinstance(error, PenstockError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}{hint_of_limit(str(error))}"
    if _has_no_temporary_folder(error):
        return (
            f"no temporary file can be written ({error.strerror}). Raise the limit of file sizes (ulimit -f), free "
            "some space there, or set TMPDIR to a folder that can be written"
        )
    if isinstance(error, MemoryError):
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        place = f" at {frame[0].filename}:{frame[0].lineno}" if frame else ""
        return (
            f"no memory is left{place}{f' ({error})' if str(error) else ''}. Raise the limit (ulimit -v), use a "
            "smaller model or batch, or put fewer ranks on this machine"
        )
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{trace}\n\n{REPORT}" if status_of(error) is ExitStatus.BUG else trace


def _has_no_temporary_folder(error: BaseException) -> TypeGuard[OSError]:
    """Whether Python found no folder for temporary files: it tries to write one in each."""
    return isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error.strerror)


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether memory or torch's network failed; torch is not imported for that."""
    is_torch = type(error).__module__.partition(".")[0] == "torch"
    return is_torch or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
