"""Results on the command line: which format is wanted, and where it goes."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.arguments import add_format, add_output
from penstock.cli.output import path_to_write, say, stdout_screen
from penstock.errors import ConfigError
from penstock.show import CHART_SUFFIXES, PICTURES
from penstock.tables import NO_SCREEN, Screen

THEMES = ("light", "dark")
BINARY = ("png",)
TABLE = "table"
"""The format for people to read, in the terminal's characters; every other format has an encoding of its own."""
TABLE_SUFFIXES = {".txt": TABLE, ".json": "json"} | CHART_SUFFIXES
"""The format of a result of figures, which can be drawn too, by the suffix of its file."""


def add_result_arguments(parser: ArgumentParser, formats: Sequence[str], text: str) -> None:
    """Add in which format a result is written, and where; `text` ends the help. Only pictures have a theme."""
    add_format(parser, formats, text)
    parser.add_argument("--theme", choices=THEMES, help="of a picture (default: light; HTML follows the browser)")
    add_output(parser, "write there instead of to standard output")


@dataclass(frozen=True, slots=True)
class Output:
    """The format of a result, and the file where it goes; without one, standard output."""

    format: str
    path: Path | None = None

    @classmethod
    def of(
        cls, arguments: Namespace, suffixes: dict[str, str], default: str, takes: Mapping[str, Sequence[str]]
    ) -> "Output":
        """Return the output that the arguments ask for; `takes` has the formats that an option is for.

        Raises:
            ConfigError: for an unknown suffix without --to, a suffix of another format, an option that would change
                nothing, and a file that exists.
        """
        format = wanted_format(arguments, suffixes, default)
        for name, formats in takes.items():
            refuse_useless(arguments, name, format, formats)
        if arguments.output is None:
            return cls(format)
        return cls(format, path_to_write(arguments.output, is_forced=arguments.force, key="--output"))

    @property
    def screen(self) -> Screen:
        """The screen for which a table is made."""
        return NO_SCREEN if self.path else stdout_screen()

    def require_displayable(self) -> None:
        """Refuse a binary format on a terminal. Raises: ConfigError."""
        if self.path is None and self.format in BINARY and sys.stdout.isatty():
            raise ConfigError(f"a terminal cannot show {self.format}; give --output NAME.{self.format}", key="--output")

    def write(self, result: bytes | str) -> None:
        """Write a result to the file, whole or not at all, or to standard output; a text gets its last line end.

        Raises:
            ConfigError: for a binary format on a terminal.
            PenstockError: if the file cannot be written.
        """
        from penstock.files import atomic_file

        data = f"{result}\n".encode() if isinstance(result, str) else result
        if self.path is None and self.format == TABLE:
            say(data.decode())  # in characters that the terminal has
            return
        self.require_displayable()
        if self.path is None:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            return
        with atomic_file(self.path.resolve()) as file:
            file.write(data)


def wanted_format(arguments: Namespace, suffixes: dict[str, str], default: str) -> str:
    """Return the format that is asked for: by --to, else by the suffix of --output, else the default.

    Raises:
        ConfigError: for an unknown suffix without --to, and for a suffix of another format.
    """
    if arguments.output is None:
        return str(arguments.format or default)
    by_suffix = suffixes.get(Path(arguments.output).suffix.lower())
    if arguments.format is None and by_suffix is None:
        known_suffixes = ", ".join(suffixes)
        raise ConfigError(
            f"{arguments.output} has none of the suffixes {known_suffixes}; end it in one of them, or give --to",
            key="--output",
        )
    if by_suffix in PICTURES and arguments.format not in (None, by_suffix):
        raise ConfigError(
            f"the suffix of {arguments.output} means {by_suffix}, but --to is {arguments.format}; make them agree",
            key="--output",
        )
    return str(arguments.format or by_suffix)


def refuse_useless(arguments: Namespace, name: str, format: str, formats: Sequence[str]) -> None:
    """Refuse an argument that only some formats take, where another one is written: it would change nothing."""
    if getattr(arguments, name) is not None and format not in formats:
        raise ConfigError(f"only for {', '.join(formats)}; leave it out for {format}", key=f"--{name}")
