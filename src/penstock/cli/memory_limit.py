"""The option `--memory-limit`, which several commands take: its help, and how it is read and checked."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

OPTION = "--memory-limit"
HELP = (
    "what a rank may hold at once: 20GiB, or a number of bytes, with costs that say how large activations are; "
    "or '12 activations'"
)


def add_memory_limit(parser: ArgumentParser, help: str = HELP) -> None:
    """Add the option to a command."""
    parser.add_argument(OPTION, metavar="LIMIT", help=help)


def memory_limit_of(arguments: Namespace, activation_bytes: Sequence[float] | None) -> Any:
    """Return the `Limit` that is given, or None; `activation_bytes` are those of the costs, None without costs.

    Raises:
        ConfigError: for anything but a limit, and for bytes where nobody knows how large activations are.
    """
    from penstock.proofs import Limit

    if arguments.memory_limit is None:
        return None
    limit = Limit.read(arguments.memory_limit, OPTION)
    limit.require_sizes(activation_bytes, OPTION)
    return limit
