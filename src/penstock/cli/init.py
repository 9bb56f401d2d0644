"""`penstock init`: a small run file or script to begin from, with comments; both run as they are."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from penstock.cli.output import path_to_write, say
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError, shortened

SUMMARY = "Write a small run file, or a training script, to begin from."
RUN, SCRIPT = "run", "script"
NAMES = {RUN: "RUN.toml", SCRIPT: "train.py"}
"""The names of the files, by kind; their texts have the same names."""
TEXTS = {RUN: "starter_run.toml", SCRIPT: "starter_train.txt"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        metavar="KIND",
        nargs="?",
        type=_kind,
        default=RUN,
        help="run: a run file for `penstock train` (default); script: a training loop of your own; PATH alone will do",
    )
    names = " or ".join(NAMES.values())
    parser.add_argument("path", metavar="PATH", nargs="?", help=f"the file to write (default: {names})")
    parser.add_argument("--force", action="store_true", help="replace PATH if it exists")


def run_command(arguments: Namespace) -> int:
    from penstock.files import atomic_file

    kind, path_text = arguments.kind, arguments.path
    if kind not in NAMES:
        if path_text is not None:
            raise ConfigError(
                f"two files are named, {shortened(kind)} and {shortened(path_text)}; name one", key="PATH"
            )
        kind, path_text = _kind_of(kind), kind
    name = NAMES[kind]
    path = path_to_write(path_text or name, is_forced=arguments.force, key="PATH")
    text = Path(__file__).with_name(TEXTS[kind]).read_text(encoding="utf-8")
    with atomic_file(path.resolve()) as file:
        file.write(text.replace(name, str(path)).encode())
    say(f"{path} is written; next: {_command(kind, path)}")
    return ExitStatus.FINE


def _kind(text: str) -> str:
    """Return the text if it is a kind, or a file of one. Raises: ArgumentTypeError, which names what was meant."""
    if text in NAMES or _kind_of(text):
        return text
    fix = " or ".join(f"penstock init {path}" for path in NAMES.values())
    raise ArgumentTypeError(f"{shortened(text)} is no kind and no file of one; expected {' or '.join(NAMES)}: {fix}")


def _kind_of(path: str) -> str:
    """Return the kind of a file by the end of its name; empty where it has another one."""
    return next((kind for kind, name in NAMES.items() if Path(name).suffix == Path(path).suffix), "")


def _command(kind: str, path: Path) -> str:
    if kind == RUN:
        return f"penstock train {path}"
    return f"python {path}, or on two ranks: torchrun --standalone --nproc-per-node 2 {path}"
