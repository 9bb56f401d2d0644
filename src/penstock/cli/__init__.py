"""The command line: the only floor that reads arguments and the environment, and that prints."""

from penstock.cli.entry import main

__all__ = ["main"]
