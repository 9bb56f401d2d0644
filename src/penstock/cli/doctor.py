"""`penstock doctor --system`: one table of what this machine has, and what to fix."""

from argparse import ArgumentParser, Namespace

from penstock.cli.command import Command
from penstock.cli.output import format_table, say
from penstock.cli.status import ExitStatus


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--system", action="store_true", required=True, help="look at this machine")


def run(arguments: Namespace) -> int:
    from penstock.cli.probes import examine_system

    rows = [(finding.subject, finding.found, finding.fix) for finding in examine_system()]
    say(format_table(("what", "found", "what to fix"), rows))
    return ExitStatus.FINE


COMMAND = Command("doctor", "Show what this machine has for training, and what to fix.", add_arguments, run)
