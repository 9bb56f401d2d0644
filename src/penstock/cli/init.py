"""`penstock init`: a small run file or script to begin from, with comments; both run as they are."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from penstock.cli.output import path_to_write, say
from penstock.cli.status import ExitStatus
from penstock.errors import MAX_KEY_CHARACTERS, cut, shortened

SUMMARY = "Write a small run file, or a training script, to begin from."
RUN, SCRIPT = "run", "script"
NAMES = {RUN: "RUN.toml", SCRIPT: "train.py"}
"""Of the files, as their texts name them too."""
TEXTS = {RUN: "starter_run.toml", SCRIPT: "starter_train.txt"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        metavar="KIND",
        nargs="?",
        type=_kind,
        choices=tuple(NAMES),
        default=RUN,
        help="run: a run file for `penstock train` (default); script: a training loop of your own",
    )
    names = " or ".join(NAMES.values())
    parser.add_argument("path", metavar="PATH", nargs="?", help=f"the file to write (default: {names})")
    parser.add_argument("--force", action="store_true", help="replace PATH if it exists")


def run(arguments: Namespace) -> int:
    from penstock.files import atomic_file

    name = NAMES[arguments.kind]
    path = path_to_write(arguments.path or name, is_forced=arguments.force, key="PATH")
    text = Path(__file__).with_name(TEXTS[arguments.kind]).read_text(encoding="utf-8")
    with atomic_file(path.resolve()) as file:
        file.write(text.replace(name, str(path)).encode())
    say(f"{path} is written; next: {_command(arguments.kind, path)}")
    return ExitStatus.FINE


def _kind(text: str) -> str:
    """Return the text if it is a kind. Raises: ArgumentTypeError, which names the command that was meant."""
    if text in NAMES:
        return text
    meant = {kind: text for kind, name in NAMES.items() if Path(name).suffix == Path(text).suffix} or NAMES
    fix = " or ".join(f"penstock init {kind} {cut(path, MAX_KEY_CHARACTERS)}" for kind, path in meant.items())
    raise ArgumentTypeError(f"{shortened(text)} is no kind; expected {' or '.join(NAMES)}: {fix}")


def _command(kind: str, path: Path) -> str:
    if kind == RUN:
        return f"penstock train {path}"
    return f"python {path}, or on two ranks: torchrun --standalone --nproc-per-node 2 {path}"
