"""Prints an error of Penstock or a Ctrl-C that nobody caught, on one rank alone and without our own frames.

Installed by a pipeline that joins the ranks of torchrun, since the process is its own then. Errors of other kinds go to
the hook that was there before. The whole traceback is kept: in the file that torchrun names in its table, and in the
log (logger `penstock`, at debug).
"""

import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import TracebackType

import torch

from penstock import errors
from penstock.errors import PenstockError, PipelineError

LOG = logging.getLogger("penstock")
_HIDDEN = (contextlib.__file__, *(f"{Path(file).parent}{os.sep}" for file in (errors.__file__, torch.__file__)))
"""Files, and folders of files, whose frames say nothing to the user."""
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install(claims: Callable[[int | None], bool], error_file: str) -> None:
    """Print uncaught errors of Penstock, and interrupts, once: on the rank for which `claims(rank to blame)` is true.

    `error_file` is where torchrun looks for a reason, if it does.
    """
    previous_hook: Hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (PenstockError, KeyboardInterrupt)):
            previous_hook(kind, error, trace)
            return
        # A Ctrl-C reaches a rank twice: from the terminal, and again from torchrun. The process ends anyway.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_first = claims(error.rank if isinstance(error, PipelineError) else None)
        if is_first:
            sys.stderr.write(text_of(error))
        LOG.debug("the rank ends by an error", exc_info=error)
        if isinstance(error, KeyboardInterrupt):
            return  # the interpreter ends the process as interrupted ones end
        if error_file:
            _write(Path(error_file), error, is_first=is_first)
        raise SystemExit(error.exit_status)

    sys.excepthook = report


def text_of(error: BaseException) -> str:
    """Return the traceback without frames of Penstock and torch, and without causes that have no other frames."""
    trace = traceback.TracebackException.from_exception(error)
    if isinstance(error, KeyboardInterrupt):  # anywhere: say which call of the user's it ended
        user_frames = takewhile(_is_user_frame, trace.stack)
        trace.stack = traceback.StackSummary.from_list(user_frames)
        trace.__suppress_context__ = True  # the first interrupt, if this is the second
    _keep_user_frames(trace)
    return "".join(trace.format())


def _keep_user_frames(trace: traceback.TracebackException) -> None:
    while True:
        trace.stack = traceback.StackSummary.from_list([frame for frame in trace.stack if _is_user_frame(frame)])
        cause = _cause(trace)
        while cause is not None and not any(map(_is_user_frame, cause.stack)):
            cause = _cause(cause)
        trace.__cause__, trace.__context__ = cause, None
        if cause is None:
            return
        trace = cause


def _cause(trace: traceback.TracebackException) -> traceback.TracebackException | None:
    return trace.__cause__ or (None if trace.__suppress_context__ else trace.__context__)


def _is_user_frame(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(_HIDDEN)


def _write(path: Path, error: PenstockError, *, is_first: bool) -> None:
    """Write what torchrun's table shows; it takes the earliest as the root cause, by whole seconds."""
    message = str(error).partition("\n")[0] if is_first else "another rank has said why"
    when = int(time.time()) + (0 if is_first else 1)
    extra = {"timestamp": str(when), "penstock_traceback": "".join(traceback.format_exception(error))}
    try:
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    except OSError as failure:
        LOG.warning("%s cannot be written: %s", path, failure)
