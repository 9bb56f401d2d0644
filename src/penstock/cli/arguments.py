"""The arguments that several commands share, under the same names everywhere; nothing heavy is imported."""

import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from penstock.cli.completion import names_and_files
from penstock.cli.status import ExitStatus
from penstock.errors import MAX_KEY_CHARACTERS, ConfigError, cut, nearest, shortened

NAME = (
    "a family (`penstock schedules` lists them), with its own options as NAME:key=value,key=value; or a schedule "
    "file, a drawn grid included, whose own communication is left out; - is stdin"
)
FUNCTION = "a schedule of your own: the function NAME in the Python file FILE makes it"
OLD = {
    "--option": ("--set", "is called --set now"),
    "--format": ("--to", "is called --to now"),
    "--from": ("--function", "is called --function now"),
    "--per-rank": ("--per-action", "is gone: costs are per rank by default; --per-action makes them per action"),
}
"""The new option in place of an earlier one, and what a message says of it, by the earlier option."""
SETTINGS = {
    "--ranks": "pipeline.ranks",
    "--microbatches": "pipeline.microbatches",
    "--schedule": "pipeline.schedule",
    "--batch-size": "batch.size",
    "--device": "run.device",
    "--lr": "optimizer.learning_rate",
}
"""The key of a run file that does the work of an option which users try."""
MEMORY_LIMIT = "--memory-limit"
LIMIT = (
    "what a rank may hold at once: 20GiB, or a number of bytes, with costs that say how large activations are; "
    "or '6 microbatches', by their share of the stages and slices of a rank; or '12 activations'"
)
COUNTED_LIMIT = (
    "what a rank may hold at once, as '6 microbatches' or '12 activations': report what waits for it; a recorded step "
    "does not say how large activations are, so no bytes"
)


class Once(Action):
    """Store a value; refuse an empty one, and an option that is given a second time."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if values == "" or (isinstance(values, list) and "" in values):
            parser.error(f"{option_string or self.metavar} is empty")
        stored_names = vars(namespace).setdefault("given", set())
        if option_string is not None and self.dest in stored_names:
            parser.error(f"{option_string} is given twice; keep one")
        stored_names.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(ArgumentParser):
    """A parser whose errors are one line and a hint, and name the option that was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("action", None, Once)
        self.register("type", int, partial(_number, int, "a whole number"))
        self.register("type", float, partial(_number, float, "a number"))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Refuse unknown arguments here, where the command that does not know them is known."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if hasattr(arguments, "names") and not any(word.startswith("-") for word in unknown):
            arguments.names += unknown  # argparse takes only NAMEs that stand together
        elif unknown:
            self._refuse(unknown)
        return arguments, []

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush a help text before leaving, so that a full disk or a closed pipe raises where `main` handles it."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        self.exit(ExitStatus.USAGE, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        known_options = [option for action in self._actions for option in action.option_strings]
        words = [text.partition("=")[0] for text in unknown]
        for word in words:
            instead, problem = OLD.get(word, ("", ""))
            if instead in known_options:
                self.exit(ExitStatus.USAGE, f"{self.prog}: {word} {problem}\n")
        options = [word for word in words if word.startswith("-")]
        run_file = any(action.dest == "run_file" for action in self._actions)
        if run_file and options and options[0] in SETTINGS:
            self.error(f"unknown option {options[0]}; a run file sets it: --set {SETTINGS[options[0]]}=VALUE")
        if options:
            # A letter such as -x is near to any other letter, so it gets no hint of one.
            prefix = "--" if len(options[0]) == 2 else "-"
            hint = nearest(options[0], [option for option in known_options if option.startswith(prefix)])
            self.error(f"unknown option {cut(options[0], MAX_KEY_CHARACTERS)}.{hint}")
        self.error(f"unexpected argument {shortened(unknown[0])}")


def _number(read: Callable[[str], float], expected: str, text: str) -> float:
    try:
        return read(text)
    except ValueError:
        raise ArgumentTypeError(f"{shortened(text)} is not {expected}") from None


def add_one_schedule(parser: ArgumentParser) -> None:
    """Add the name of one schedule, and its shape."""
    _add_name(parser, "name", nargs="?")
    parser.add_argument("--function", metavar="FILE:NAME", help=f"instead of NAME, {FUNCTION}")
    add_shape_arguments(parser)


def add_schedules(parser: ArgumentParser) -> None:
    """Add the names of several schedules, and the shape that all of them get."""
    _add_name(parser, "names", nargs="*", more="; or all, which stands for every family that trains")
    add_repeated(parser, "--function", "FILE:NAME", f"besides the NAMEs, {FUNCTION}; may be repeated", "functions")
    add_shape_arguments(parser)


def add_repeated(parser: ArgumentParser, option: str, metavar: str, help: str, dest: str | None = None) -> None:
    """Add an option that may be given several times; its values are a list."""
    parser.add_argument(option, dest=dest, action="append", default=[], metavar=metavar, help=help)


def _add_name(parser: ArgumentParser, dest: str, *, nargs: str, more: str = "") -> None:
    name = parser.add_argument(dest, metavar="NAME", nargs=nargs, help=NAME + more)
    setattr(name, "completer", names_and_files)  # noqa: B010  # where argcomplete looks


def add_shape_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of a schedule's shape; whether a name needs a number is known only when it is looked up."""
    parser.set_defaults(wrong_usage=parser.error)
    parser.add_argument("--ranks", type=int, metavar="P", help="number of ranks; a file has its own")
    parser.add_argument("--microbatches", type=int, metavar="M", help="number of microbatches; a file has its own")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="stages on each rank (default: the family's)")
    parser.add_argument("--stages", type=int, metavar="S", help="all stages, where it is no multiple of the ranks")
    parser.add_argument("--slices", type=int, metavar="K", help="slices of each sequence (default 1)")
    text = "an option of the family (`penstock schedules NAME` lists them); may be repeated"
    add_repeated(parser, "--set", "KEY=VALUE", text, "options")
    parser.add_argument("--forward-only", action="store_true", help="the forwards alone, as in evaluation")


def add_format(parser: ArgumentParser, formats: Sequence[str], text: str, *, default: str | None = None) -> None:
    """Add the format in which a result is written; `text` ends the help."""
    parser.add_argument(
        "--to",
        dest="format",
        metavar="FORMAT",
        choices=formats,
        default=default,
        help=f"format of the result: {', '.join(formats)}; {text}",
    )


def add_output(parser: ArgumentParser, help: str, *, metavar: str = "PATH") -> None:
    """Add the file that a command writes, and whether it may replace one; `help` says what the file gets."""
    parser.add_argument("-o", "--output", metavar=metavar, help=help)
    parser.add_argument("--force", action="store_true", help=f"replace {metavar} if it exists")


def add_split(parser: ArgumentParser) -> None:
    """Add the split of the layers of COSTS over the stages."""
    parser.add_argument(
        "--split",
        metavar="LAYERS",
        help="layers of each stage, such as 3,4, for COSTS per layer (default: the split in COSTS where it has as many "
        "stages, else the layers are balanced by their seconds)",
    )


def add_heavy(parser: ArgumentParser) -> None:
    """Add the factors of ranks that take longer than the others."""
    parser.add_argument(
        "--heavy",
        metavar="RANKS",
        help="ranks whose computations take so many times what COSTS say, such as 3=2 or 0=1.5,3=2; of COSTS per "
        "layer, layers; with two routes, the factor is of the layers that the rank has on the first route, on both "
        "ranks that have them",
    )


def add_sharding(parser: ArgumentParser) -> None:
    """Add the replicas of a pipeline, and what they share out among them."""
    parser.add_argument("--data", type=int, metavar="D", help="replicas of the pipeline (default: those of COSTS)")
    parser.add_argument(
        "--shard",
        metavar="HOW",
        help="what the replicas share out: none (the default), or weights, gradients and optimizer state, of which a "
        "rank gathers all stages for a whole step (optimizer) or few at a time (full)",
    )
    parser.add_argument(
        "--residency",
        type=int,
        metavar="N",
        help="of --shard full: stages of a rank that are whole at once, those being gathered included (default 2; "
        "0: all)",
    )
    parser.add_argument(
        "--look-ahead",
        type=int,
        metavar="N",
        help="of --shard: computations before its first use at which a gather starts, if there is room (default 1)",
    )


# ---- --memory-limit


def add_memory_limit(parser: ArgumentParser, help: str = LIMIT) -> None:
    """Add the limit of a rank's memory to a command."""
    parser.add_argument(MEMORY_LIMIT, metavar="LIMIT", help=help)


def memory_limit_of(arguments: Namespace, activation_bytes: Sequence[float] | None) -> Any:
    """Return the `Limit` that is given, or None; `activation_bytes` are those of the costs, None without costs.

    Raises:
        ConfigError: for anything but a limit, and for bytes where nobody knows how large activations are.
    """
    limit = _read_limit(arguments)
    if limit is not None:
        limit.require_sizes(activation_bytes, MEMORY_LIMIT)
    return limit


def counted_limit_of(arguments: Namespace) -> Any:
    """Return the `Limit` that is given, or None, for a step whose activations are only counted.

    Raises:
        ConfigError: for anything but a limit, and for bytes.
    """
    limit = _read_limit(arguments)
    if limit is not None and limit.in_bytes:
        problem = "is a number of bytes, but a recorded step does not say how large activations are"
        raise ConfigError(f"{limit} {problem}; count them: '6 microbatches'", key=MEMORY_LIMIT)
    return limit


def _read_limit(arguments: Namespace) -> Any:
    from penstock.proofs import Limit

    return None if arguments.memory_limit is None else Limit.read(arguments.memory_limit, MEMORY_LIMIT)
