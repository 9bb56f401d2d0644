"""Where commands print: results to standard output, complaints to standard error."""

import os
import sys


def say(text: str) -> None:
    """Print a result."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def complain(text: str) -> None:
    """Print what went wrong."""
    sys.stderr.write(f"penstock: {text}\n")


def forget_stdout() -> None:
    """Point standard output at nothing: its reader is gone, and the interpreter's last flush must not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
