"""`penstock completion`: what a shell loads to complete commands, options and schedules, by argcomplete."""

from argparse import ArgumentParser, Namespace
from types import ModuleType
from typing import Any

from penstock.cli.output import say
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError

SUMMARY = "Print the lines that a shell needs to complete commands, options and names of schedules."
REQUEST = "_ARGCOMPLETE"
"""The environment variable by which a shell asks for completions instead of a command's result."""
LOADING = 'in bash and zsh: eval "$(penstock completion bash)"; in fish: penstock completion fish | source'


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = f"To load them, {LOADING}."
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that loads them")


def run_command(arguments: Namespace) -> int:
    say(_argcomplete().shellcode(["penstock"], shell=arguments.shell))
    return ExitStatus.FINE


def complete(parser: ArgumentParser) -> None:
    """Answer a shell that asks for completions, and end the process."""
    _argcomplete().autocomplete(parser)


def names_and_files(prefix: str, **context: Any) -> list[str]:
    """Return the families, and the files, whose names begin with `prefix`."""
    from penstock.schedules import FAMILIES

    families = [name for name in FAMILIES if name.startswith(prefix)]
    return families + list(_argcomplete().completers.FilesCompleter()(prefix))


def _argcomplete() -> ModuleType:
    try:
        import argcomplete
        import argcomplete.completers
    except ImportError as error:
        raise ConfigError("completion needs argcomplete. Install it: pip install argcomplete") from error
    return argcomplete  # type: ignore[no-any-return, unused-ignore]
