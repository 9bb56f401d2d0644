"""`main`: parse the arguments, run one command, turn errors into a message and an exit status."""

import errno
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Protocol

from penstock.cli import check, compare, convert, doctor, profile, schedules, show, train
from penstock.cli.compiling import compiling_reported
from penstock.cli.output import complain, forget_stdout, replace_unknown_characters
from penstock.cli.status import ExitStatus, status_of
from penstock.errors import PenstockError
from penstock.version import VERSION

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Command(Protocol):
    """A module with one command, of its name; it imports what is heavy when it runs, so that `--help` stays fast."""

    __name__: str
    SUMMARY: str

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, arguments: Namespace) -> int:
        """Return the exit status."""


COMMANDS: tuple[Command, ...] = (train, schedules, show, check, compare, convert, profile, doctor)


def build_parser() -> ArgumentParser:
    """Return the parser of all commands; nothing heavy is imported for it."""
    parser = ArgumentParser(
        prog="penstock",
        description="Pipeline-parallel training in which the schedule is data.",
        epilog="Exit status: 0 fine, 1 the input is wrong, 2 usage, 4 a rank failed, 5 a hang was ended, "
        "130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        name, summary = command.__name__.rpartition(".")[2], command.SUMMARY
        child = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` is what follows the program's name."""
    replace_unknown_characters()
    try:
        arguments = build_parser().parse_args(argv)
        with compiling_reported():
            status = int(arguments.run(arguments))
        sys.stdout.flush()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else ExitStatus.FINE
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return ExitStatus.FINE
    except OSError as error:
        # Files of ours fail with their names; what fails without one is standard output.
        if error.filename is not None or error.errno not in FULL_DISK:
            raise
        forget_stdout()
        complain(f"standard output cannot be written: {error.strerror}. Free some space where it goes")
        return ExitStatus.WRONG_INPUT
    except PenstockError as error:
        complain(str(error))
        return status_of(error)
    return status
