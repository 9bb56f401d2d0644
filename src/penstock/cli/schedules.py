"""`penstock schedules`: every family with its options and limits."""

from argparse import ArgumentParser, Namespace

from penstock.cli.command import Command
from penstock.cli.output import say
from penstock.cli.status import ExitStatus


def add_arguments(parser: ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(arguments: Namespace) -> int:
    from penstock.cli.describe import describe_family
    from penstock.schedules import FAMILIES

    say("\n\n".join(describe_family(family) for family in FAMILIES.values()))
    return ExitStatus.FINE


COMMAND = Command("schedules", "List every family of schedules, its options and its limits.", add_arguments, run)
