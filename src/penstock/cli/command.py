"""What every command hands to the parser: its name, its help, its arguments and the function that runs it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command. `run` returns the exit status; it imports what is heavy, so that `--help` stays fast."""

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
