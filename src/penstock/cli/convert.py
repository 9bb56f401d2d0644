"""`penstock convert`: a schedule or program from one format to another, proved on the way; or weights."""

from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.cli.check import read_text
from penstock.cli.output import path_to_write, say
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError, count_of
from penstock.ir.formats import FORMAT_OF_SUFFIX, READABLE, WITH_COMMUNICATION, WRITABLE

SUMMARY = "Convert a schedule file to another format, proved on the way, or weights to Hugging Face's layout."
FROM_HELP = f"format of IN: {', '.join(READABLE)} (default: by its content)"
LIKE_HELP = (
    "convert weights: IN is a checkpoint, a run folder or a file of weights, with the names of a transformers model; "
    "OUT is a folder that from_pretrained loads; FOLDER has config.json and tokenizer files of the model"
)
TO_HELP = f"format of OUT: {', '.join(WRITABLE)} (default: by its suffix)"
STREAM = "-"
"""The name that stands for standard input or output."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="a schedule or program in any format; - is stdin")
    parser.add_argument("target", metavar="OUT", help="the file to write, whole or not at all; - is stdout")
    parser.add_argument("--from", dest="source_format", metavar="FORMAT", choices=READABLE, help=FROM_HELP)
    parser.add_argument("--to", dest="target_format", metavar="FORMAT", choices=WRITABLE, help=TO_HELP)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--lowered", action="store_true", help="add communication if IN has none; CSV and JSON hold it")
    kind.add_argument("--compute-only", action="store_true", help="drop communication; other formats do anyway")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--like", metavar="FOLDER", help=LIKE_HELP)


def run_command(arguments: Namespace) -> int:
    return _convert_schedule(arguments) if arguments.like is None else _convert_weights(arguments)


def _convert_weights(arguments: Namespace) -> int:
    schedule_flags = {
        "--from": arguments.source_format,
        "--to": arguments.target_format,
        "--lowered": arguments.lowered,
        "--compute-only": arguments.compute_only,
    }
    for flag in (flag for flag, value in schedule_flags.items() if value):
        raise ConfigError(f"is for schedules, and --like for weights; drop {flag} or --like", key=flag)
    paths = map(Path, (arguments.source, arguments.target, arguments.like))
    say(convert_to_pretrained(*paths, is_forced=arguments.force))
    return ExitStatus.FINE


def _convert_schedule(arguments: Namespace) -> int:
    from penstock.cli.conversion import convert, read_plan
    from penstock.files import atomic_file

    target_format = arguments.target_format or _format_of_name(arguments.target)
    if arguments.lowered and target_format in ("grid", "megatron"):
        formats = " or ".join(WITH_COMMUNICATION)
        raise ConfigError(f"{target_format} holds actions alone; write {formats} to add communication", key="--lowered")
    is_stdout = arguments.target == STREAM
    path = None if is_stdout else path_to_write(arguments.target, is_forced=arguments.force, key="OUT")
    is_stdin = arguments.source == STREAM
    file, name = ("<stdin>", None) if is_stdin else (arguments.source, Path(arguments.source).stem)
    plan = read_plan(read_text(arguments.source), file=file, name=name, format=arguments.source_format)
    plan = plan.actions() if arguments.compute_only else plan
    text, summary = convert(plan, target_format, file=file, is_lowered=arguments.lowered)
    if path is None:
        say(text)
        return ExitStatus.FINE
    with atomic_file(path.resolve()) as output:
        output.write(text.encode())
    say(f"{arguments.target}: {summary}")
    return ExitStatus.FINE


def _format_of_name(name: str) -> str:
    suffix = Path(name).suffix
    if suffix.lower() in FORMAT_OF_SUFFIX:
        return FORMAT_OF_SUFFIX[suffix.lower()]
    suffixes = ", ".join(FORMAT_OF_SUFFIX)
    problem = "standard output has no name" if name == STREAM else f"{name} does not end in any of {suffixes}"
    raise ConfigError(f"{problem}, which would tell its format; give one of {', '.join(WRITABLE)}", key="--to")


# ---- weights


def convert_to_pretrained(source: Path, target: Path, like: Path, *, is_forced: bool) -> str:
    """Write the weights of a checkpoint, run folder or file into a folder that `from_pretrained` loads.

    Return a line that says what was written. Configuration and tokenizer files are copied from the folder `like`, which
    says what model it is. Of a run that trains an adapter, the adapter is written, as peft saves it. `is_forced` allows
    a target that is there. A target that was made here is removed if it stays empty.

    Raises:
        ConfigError: the target is not free, or `like` is no model of transformers.
        CheckpointError: there are no weights, or they are not of this model.
        NotSaved: a file cannot be written.
    """
    from penstock.hugging_face import source as sources
    from penstock.hugging_face.adapter_files import AdapterFormat
    from penstock.hugging_face.pretrained_out import convert_weights

    _require_free(target, is_forced=is_forced)
    try:
        model = sources.on_meta(like, sources.folder_of(like))
    except ConfigError as error:
        raise ConfigError(error.problem, key="--like") from error
    adapter = _adapter_of_run(source, model)
    is_new = not target.exists()
    target.mkdir(exist_ok=True)
    try:
        source_path = convert_weights(source, target, model, like, adapter and AdapterFormat(adapter))
    except BaseException:
        if is_new:
            with suppress(OSError):
                target.rmdir()
        raise
    if adapter is not None:
        return f"{target}: an adapter for {type(model).__name__} with the weights of {source_path}"
    files = list(target.glob("model*.safetensors"))
    return f"{target}: {type(model).__name__} with the weights of {source_path}, in {count_of(len(files), 'file')}"


def _adapter_of_run(source: Path, model: Any) -> Any:
    """Return the adapter that a run has trained, put into its model; None where there is none. Raises: ConfigError."""
    from penstock.hugging_face.adapters import Adapter
    from penstock.train.folder.run_folder import CONFIG
    from penstock.train.model_source import adapter_of
    from penstock.train.settings.config import load_config

    if not (source / CONFIG).is_file():
        return None
    adapter = adapter_of(load_config(source / CONFIG))
    return None if adapter is None else Adapter.on(model, adapter)


def _require_free(target: Path, *, is_forced: bool) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder; make it first", key="OUT")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is not a folder; give another name", key="OUT")
    if not is_forced and target.is_dir() and any(target.iterdir()):
        raise ConfigError(
            f"{target} exists and is not empty; give another name, or --force to replace the model in it", key="OUT"
        )
