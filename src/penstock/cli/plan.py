"""`penstock plan`: whether a model fits a cluster, which layout takes least time, and the run file of it."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from time import monotonic
from typing import Any

from penstock.cli.arguments import add_format, add_output
from penstock.cli.output import complain, path_to_write, say, stdout_screen
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError

SUMMARY = "Plan a training before its launch: whether it fits, which layout is fastest, how long a step takes."
EXPORTS = ("torchtitan", "automodel")
SECONDS_BETWEEN_LINES = 2.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock plan`: the model, the cluster, the batch, and what is written."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder of Hugging Face, of which config.json suffices; a run file; or FILE.py:FUNCTION that makes "
        "layers, as model.source",
    )
    parser.add_argument("--gpus", type=int, metavar="N", required=True, help="devices of all nodes together")
    parser.add_argument("--nodes", type=int, metavar="N", default=1, help="nodes that share them evenly (default 1)")
    parser.add_argument("--device", metavar="NAME", help="such as h100-sxm; without it give --costs and --memory")
    parser.add_argument("--memory", metavar="BYTES", help="what a device has, such as 80GiB (default: all of its own)")
    parser.add_argument("--sequence-length", type=int, metavar="S", required=True, help="tokens of a sequence")
    parser.add_argument("--global-batch", type=int, metavar="B", required=True, help="sequences of a step, of all GPUs")
    parser.add_argument("--run", metavar="BASE.toml", help="a run file whose other settings and comments stay")
    parser.add_argument(
        "--costs", metavar="FILE", help="costs per layer of penstock profile, in the place of the device's roofline"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="how long to search the best layouts (default 5)"
    )
    parser.add_argument(
        "--export",
        nargs=2,
        metavar=("TRAINER", "DIR"),
        help=f"write schedule and modules of each part for {' or '.join(EXPORTS)} into a folder",
    )
    add_format(parser, ("table", "json"), "default: table", default="table")
    add_output(parser, "write the run file of the best layout, and a searched schedule beside it", metavar="RUN.toml")


def run_command(arguments: Namespace) -> int:
    """Run `penstock plan`. Raises: ConfigError, as `ps.plan_run`, or for a file or folder that cannot be written."""
    run_file = _path_of_run(arguments)
    folder = _folder_of_export(arguments)
    from penstock.cli.planned import to_table
    from penstock.run_planning.plan_run import plan_run

    plan = plan_run(
        arguments.model,
        gpus=arguments.gpus,
        nodes=arguments.nodes,
        device=arguments.device,
        memory=arguments.memory,
        sequence_length=arguments.sequence_length,
        global_batch=arguments.global_batch,
        base=arguments.run,
        costs=arguments.costs,
        seconds=arguments.seconds,
        tell=_ProgressLines(),
        needs_run_file=run_file is not None,
    )
    say(plan.to_json() if arguments.format == "json" else to_table(plan, stdout_screen()))
    if run_file is not None:
        _write_run(plan, run_file, is_quiet=arguments.format == "json")
    if folder is not None:
        _write_export(plan, arguments.export[0], folder, is_quiet=arguments.format == "json")
    return ExitStatus.FINE


def _path_of_run(arguments: Namespace) -> Path | None:
    """Return where the run file goes; the schedule beside it is as new as it. Raises: ConfigError."""
    if arguments.output is None:
        return None
    path = path_to_write(arguments.output, is_forced=arguments.force, key="--output")
    if path.suffix != ".toml":
        raise ConfigError(f"{path} does not end in .toml, as a run file; give such a name", key="--output")
    path_to_write(str(_schedule_of(path)), is_forced=arguments.force, key="--output")
    return path


def _schedule_of(run_file: Path) -> Path:
    return run_file.with_suffix(".schedule.json")


def _folder_of_export(arguments: Namespace) -> Path | None:
    """Return the folder of an export, which may be new. Raises: ConfigError."""
    if arguments.export is None:
        return None
    kind, name = arguments.export
    if kind not in EXPORTS:
        from penstock.errors import nearest

        raise ConfigError(f"{kind} is unknown; known: {', '.join(EXPORTS)}.{nearest(kind, EXPORTS)}", key="--export")
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give another name", key="--export")
    if folder.is_dir() and any(folder.iterdir()) and not arguments.force:
        raise ConfigError(f"{folder} is not empty; give another name, or --force to replace files", key="--export")
    return folder


def _write_run(plan: Any, path: Path, *, is_quiet: bool) -> None:
    from penstock.files import atomic_file

    text = plan.run_toml(str(_schedule_of(path)), folder=f"runs/{path.stem}")
    if not plan.best.planned.family:
        with atomic_file(_schedule_of(path).resolve()) as file:
            file.write(plan.best.planned.schedule.to_json().encode())
    with atomic_file(path.resolve()) as file:
        file.write(text.encode())
    if not is_quiet:
        say(f"{path} is written; next: penstock train {path}")


def _write_export(plan: Any, kind: str, folder: Path, *, is_quiet: bool) -> None:
    from penstock.files import atomic_file

    files = plan.export(kind, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with atomic_file((folder / name).resolve()) as file:
            file.write(text.encode())
    if not is_quiet:
        say(f"written for {kind}: {', '.join(str(folder / name) for name in files)}")


class _ProgressLines:
    """Prints what is being done, if standard error is a terminal; not more than a line every two seconds."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._last_s = float("-inf")

    def __call__(self, text: str) -> None:
        if self._is_shown and monotonic() - self._last_s >= SECONDS_BETWEEN_LINES:
            self._last_s = monotonic()
            complain(text)
