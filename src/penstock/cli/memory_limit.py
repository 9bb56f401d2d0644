"""The option `--memory-limit`, which several commands take: its help, and how it is read and checked."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from penstock.errors import ConfigError

OPTION = "--memory-limit"
HELP = (
    "what a rank may hold at once: 20GiB, or a number of bytes, with costs that say how large activations are; "
    "or '12 activations'"
)

COUNTED_HELP = (
    "what a rank may hold at once, as '12 activations': report what waits for it; a recorded step does not say how "
    "large activations are, so no bytes"
)


def add_memory_limit(parser: ArgumentParser, help: str = HELP) -> None:
    """Add the option to a command."""
    parser.add_argument(OPTION, metavar="LIMIT", help=help)


def memory_limit_of(arguments: Namespace, activation_bytes: Sequence[float] | None) -> Any:
    """Return the `Limit` that is given, or None; `activation_bytes` are those of the costs, None without costs.

    Raises:
        ConfigError: for anything but a limit, and for bytes where nobody knows how large activations are.
    """
    limit = _read(arguments)
    if limit is not None:
        limit.require_sizes(activation_bytes, OPTION)
    return limit


def counted_limit_of(arguments: Namespace) -> Any:
    """Return the `Limit` that is given, or None, for a step whose activations are only counted.

    Raises:
        ConfigError: for anything but a limit, and for bytes.
    """
    limit = _read(arguments)
    if limit is not None and limit.in_bytes:
        problem = "is a number of bytes, but a recorded step does not say how large activations are"
        raise ConfigError(f"{limit} {problem}; count them: '12 activations'", key=OPTION)
    return limit


def _read(arguments: Namespace) -> Any:
    from penstock.proofs import Limit

    return None if arguments.memory_limit is None else Limit.read(arguments.memory_limit, OPTION)
