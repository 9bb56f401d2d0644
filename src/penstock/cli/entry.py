"""`main`: parse the arguments, run one command, turn errors into a message and an exit status."""

import errno
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Protocol

from penstock.cli import (
    check,
    compare,
    completion,
    convert,
    doctor,
    evaluate,
    generate,
    init,
    plan,
    profile,
    runs,
    schedules,
    search,
    show,
    train,
    verify,
)
from penstock.cli.arguments import Parser
from penstock.cli.output import complain, forget_stdout, may_be_full, open_closed_streams, replace_unknown_characters
from penstock.cli.status import MEANINGS, ExitStatus, message_of, status_of
from penstock.cli.waiting import compiling_reported, waiting_reported
from penstock.errors import nearest, shortened
from penstock.version import VERSION

FIRST_COMMANDS = """\
Pipeline-parallel training in which the schedule is data.

Draw a schedule:
  penstock show 1f1b --ranks 4 --microbatches 8
Predict time, idle time and memory:
  penstock compare 1f1b zb-h1 --ranks 4 --microbatches 8
Train a small model on two processes:
  penstock train examples/demo.toml

All commands: penstock --help
"""
"""The text that is printed without a command."""
FREE_SPACE = "Free some space where it goes"
CURE_OF_OUTPUT = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f)",
    errno.EBADF: "It is not open for writing: redirect it to a file",
}
"""The cure of an output that cannot be written, by the number of the system's error."""


class Command(Protocol):
    """A module with one command, of its name; it imports what is heavy when it runs, so that `--help` stays fast."""

    __name__: str
    SUMMARY: str

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run_command(self, arguments: Namespace) -> int:
        """Return the exit status."""


COMMANDS: tuple[Command, ...] = (
    init, train, schedules, show, check, verify, compare, search, plan, convert, profile, doctor, runs, generate,
    evaluate, completion,
)  # fmt: skip


def _name_of(command: Command) -> str:
    return command.__name__.rpartition(".")[2]


def build_parser() -> Parser:
    """Return the parser of all commands; nothing heavy is imported for it."""
    parser = Parser(
        prog="penstock",
        description="Pipeline-parallel training in which the schedule is data.",
        epilog=f"Exit status: {', '.join(f'{status} {meaning}' for status, meaning in MEANINGS.items())}.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        summary = command.SUMMARY
        child = commands.add_parser(_name_of(command), help=summary, description=summary)
        command.add_arguments(child)
        child.set_defaults(run_command=command.run_command)
    return parser


def _parse(argv: Sequence[str]) -> Namespace:
    parser = build_parser()
    if completion.REQUEST in os.environ:
        completion.complete(parser)
    names = [_name_of(command) for command in COMMANDS]
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        parser.error(f"unknown command {shortened(argv[0])}; known: {', '.join(names)}.{nearest(argv[0], names)}")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.exit(ExitStatus.USAGE, FIRST_COMMANDS)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` is what follows the program's name."""
    open_closed_streams()
    replace_unknown_characters()
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        with compiling_reported(), waiting_reported(arguments):
            status = int(arguments.run_command(arguments))
        sys.stdout.flush()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else ExitStatus.FINE
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return ExitStatus.FINE
    # Any other error becomes a message and an exit status; messages of `PenstockError` name the fix.
    except Exception as error:
        # An OSError without a file name comes from a write, to standard output or to a file of the command.
        if isinstance(error, OSError) and error.filename is None and error.errno in CURE_OF_OUTPUT:
            target = "standard output"
            if may_be_full(sys.stdout):
                forget_stdout()
            else:
                target = "a file of this command"
            complain(f"{target} cannot be written: {error.strerror}. {CURE_OF_OUTPUT[error.errno]}")
            return ExitStatus.WRONG_INPUT
        complain(message_of(error))
        return status_of(error)
    return status
