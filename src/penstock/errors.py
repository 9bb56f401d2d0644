"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ScheduleError          a schedule or program cannot run (all violations at once)
    ├── FormatError            a text or file cannot be read (file, line, column)
    ├── ConfigError            a setting is wrong (key, nearest valid key)
    ├── PartitionError         a model cannot be split as asked
    ├── PipelineError          a step failed (rank, instruction, peer, seconds waited)
    │   ├── StepRefused        all ranks refuse a step, or another call, before anything ran
    │   │   └── EndOfData      a stream has nothing for it
    │   ├── PeerLost           a peer's process or connection is gone
    │   │   └── PeerLeft       it has closed the pipeline, or ended; also a StepRefused
    │   └── DeadlineExceeded   a wait outlived its deadline
    ├── NotFinite              a loss or gradient norm of a run is infinite or not a number
    └── CheckpointError        a checkpoint cannot be read or written, or there is none
        └── NotSaved           one cannot be written

A message says where, what, what was expected, and the fix.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import FrameType

MAX_SHOWN = 10
MAX_KEY_CHARACTERS = 80
MAX_PATH_CHARACTERS = 300
MAX_MEANT_CHARACTERS = 60
"""Nothing that is longer is taken for a misspelt name."""


class PenstockError(Exception):
    """Base of every error raised on purpose: catching it catches them all."""

    exit_status = 1
    """The exit status of a process in which nobody catches it, such as a `penstock` command."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, at one place of one rank."""

    rank: int
    position: int
    """Index in the rank's order, counted from 0."""
    action: str
    """Text of the action or instruction at that place; empty where something is missing."""
    problem: str
    """The fault, and what was expected."""
    fix: str

    def __str__(self) -> str:
        where = f"rank {self.rank}, position {self.position}"
        subject = f"{self.action} " if self.action else ""
        return f"{where}: {subject}{self.problem}. {self.fix}."


class ScheduleError(PenstockError):
    """A proof about a schedule or program failed; `violations` holds every finding."""

    def __init__(self, title: str, violations: Sequence[Violation] = (), picture: str = "") -> None:
        self.title = title
        self.violations = tuple(violations)
        self.picture = picture
        super().__init__(title, self.violations, picture)

    def __str__(self) -> str:
        lines = [self.title]
        lines += [f"  {violation}" for violation in self.violations[:MAX_SHOWN]]
        if len(self.violations) > MAX_SHOWN:
            lines.append(f"  ... {len(self.violations)} violations in all")
        if self.picture:
            lines += ["", self.picture]
        return "\n".join(lines)


class FormatError(PenstockError):
    """A text does not follow its format; lines and columns count from 1."""

    def __init__(self, problem: str, *, file: str = "<text>", line: int = 1, column: int = 1) -> None:
        self.problem = problem
        self.file = file
        self.line = line
        self.column = column
        super().__init__(problem, file, line, column)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.problem}"


class ConfigError(PenstockError):
    """A setting cannot be used; `key` is its dotted name, and `problem` what is wrong with it."""

    def __init__(self, problem: str, *, key: str = "") -> None:
        self.key, self.problem = key, problem
        super().__init__(f"{cut(key, MAX_KEY_CHARACTERS)}: {problem}" if key else problem)


class PartitionError(PenstockError):
    """A model cannot be split into the stages that the schedule needs."""


class NotFinite(PenstockError):
    """A loss or a gradient norm is infinite or not a number, so a run ends before its weights change."""

    exit_status = 7


class CheckpointError(PenstockError):
    """A checkpoint, or a file of weights, cannot be read or written, or there is none."""

    exit_status = 6


class NotSaved(CheckpointError):
    """A checkpoint, or a file of weights, cannot be written; those of before are as they were."""

    exit_status = 1


class PipelineError(PenstockError):
    """A step failed; every rank raises an error for it. `__cause__` says why on the rank to blame.

    `rank` is the rank to blame, the same number on every rank; of a mesh, that in torch's default group. It is None
    where no single rank is to blame: ranks wait for each other in a cycle, or all were given the same wrong arguments.
    A rank that cannot see where the others are, on other hosts or while a pipeline is created, blames the rank that it
    waited for. `instruction`, `peer` and `waited_s` are those of the rank that raises: what it ran, for which rank it
    waited, and for how many seconds. `finding` is where the first value that is not finite was made, the same text on
    every rank that can see it, if that is why the step failed; else empty.
    """

    exit_status = 4

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        instruction: str = "",
        peer: int | None = None,
        waited_s: float | None = None,
        finding: str = "",
    ) -> None:
        self.rank = rank
        self.instruction = instruction
        self.peer = peer
        self.waited_s = waited_s
        self.finding = finding
        super().__init__(message)

    def blame(self, rank: int) -> None:
        """Say that the error is of this rank, where it blames none."""
        if self.rank is None:
            self.rank = rank


class StepRefused(PipelineError):
    """All ranks refuse a step, or another call, alike and before anything ran.

    Nothing has changed, and nothing needs to recover. So are calls refused that only some of the ranks make.
    """


class EndOfData(StepRefused):
    """A `Stream` was at its end when the step began; every rank gets this error."""


class PeerLost(PipelineError):
    """The process or the connection of a peer is gone."""


class PeerLeft(StepRefused, PeerLost):
    """A peer has closed the pipeline, or its process has ended in good order, while others are in a call."""


class DeadlineExceeded(PipelineError):
    """A wait took longer than its deadline."""

    exit_status = 5


class PenstockWarning(UserWarning):
    """Something runs, but not as its user would want it to."""


def cut(text: str, most: int) -> str:
    """Return a text with its end left out where it has more characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


_INTERNAL = ("penstock", "torch", "contextlib")


def users_frame() -> tuple[FrameType, int]:
    """Return the innermost frame that is neither Penstock's nor torch's, and how many calls it is above this one."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        frame, level = frame.f_back, level + 1
    return frame, level


def warn(message: str) -> None:
    """Give a `PenstockWarning` at the innermost line that is neither Penstock's nor torch's: the user's."""
    warnings.warn(message, PenstockWarning, stacklevel=users_frame()[1])


def shortened(value: object, most: int = 40) -> str:
    """Return a value as a message quotes it, cut where it is long."""
    return cut(repr(value), most)


_FIX_OF_LIMIT = {
    "Too many open files": "Raise the limit of open files (ulimit -n)",
    "File too large": "Raise the limit of file sizes (ulimit -f), or choose a file system that takes larger files",
}


def hint_of_limit(reason: str) -> str:
    """Return what helps where the system gives a limit of its own as the reason; empty where it gives another."""
    return next((f". {fix}" for limit, fix in _FIX_OF_LIMIT.items() if limit in reason), "")


def described(value: object) -> str:
    """Return a value as a message about a wrong one names it: shortened, and with its type."""
    return "None" if value is None else f"{shortened(value)} of type {type(value).__name__}"


def listed(
    names: Sequence[str], most: int = MAX_SHOWN, *, separator: str = ", ", quoted: Callable[[str], str] = str
) -> str:
    """Return the first names one after the other, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{separator.join(map(quoted, names[:most]))}{more}"


def require_choice(key: str, given: object, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices. Raises: ConfigError."""
    if given not in choices:
        near = nearest(given, choices) if isinstance(given, str) else ""
        raise ConfigError(f"{described(given)}; expected one of {', '.join(choices)}.{near}", key=key)


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `4 ranks`, `2 microbatches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest known names, or an empty string."""
    if len(name) > MAX_MEANT_CHARACTERS:
        return ""
    close = get_close_matches(name, list(known), n=3, cutoff=0.5)
    if not close:
        return ""
    return " Did you mean " + " or ".join(repr(match) for match in close) + "?"
