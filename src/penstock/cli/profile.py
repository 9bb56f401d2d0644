"""`penstock profile`: measure what a run costs, on ranks started here or as one of the ranks that torchrun started."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cli.arguments import add_output
from penstock.cli.output import path_to_write
from penstock.cli.run_file import add_run_arguments, run_on_ranks
from penstock.errors import ConfigError

SUMMARY = "Measure what a run's computations and messages cost, and write it for `compare` and `show`."
NUM_STEPS = 5


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=NUM_STEPS,
        metavar="N",
        help=f"recorded steps, after two others (default {NUM_STEPS})",
    )
    add_output(
        parser,
        "where the costs of each layer go, for --costs of other commands (default: costs.toml in the run folder)",
        metavar="FILE.toml",
    )


def run_command(arguments: Namespace) -> int:
    if arguments.steps < 1:
        raise ConfigError(f"{arguments.steps} steps; record 1 or more", key="--steps")
    command = ["profile", f"--steps={arguments.steps}"]
    if arguments.output is not None:
        command.append(f"--output={arguments.output}")
    command += ["--force"] * arguments.force
    return run_on_ranks(arguments, command, partial(_profile, arguments), partial(_hold_folder, arguments))


@contextmanager
def _hold_folder(arguments: Namespace, config: Any) -> Iterator[Any]:
    """Refuse to replace costs; remove what killed ranks left half-written, unless a training in the folder goes on."""
    from penstock.train.folder.run_folder import RunFolder, run_path
    from penstock.train.folder.run_lock import holder_of

    path = run_path(config.run.folder)
    _path_of_costs(arguments, config)
    try:
        yield config
    finally:
        if not holder_of(path):
            RunFolder(path).sweep()


def _path_of_costs(arguments: Namespace, config: Any) -> Path:
    from penstock.train.folder.run_folder import COSTS

    usual = Path(config.run.folder) / COSTS
    if arguments.output is None and not usual.parent.exists():
        return usual  # the run makes its folder
    return path_to_write(arguments.output or str(usual), is_forced=arguments.force, key="--output")


def _profile(arguments: Namespace, config: Any) -> None:
    from penstock.cli.output import say, stdout_screen
    from penstock.cli.profile_text import profile_text
    from penstock.files import atomic_file
    from penstock.simulation.costs.writing import costs_to_toml
    from penstock.train.profiling import profile_run

    path = _path_of_costs(arguments, config)
    profile = profile_run(config, num_steps=arguments.steps)
    if profile.rank != 0:
        return
    with atomic_file(path.absolute()) as file:
        file.write(costs_to_toml(profile.layer_costs).encode())
    say(
        f"{profile_text(profile, stdout_screen())}\n\ncosts written to {path}: penstock compare NAME ... --costs {path}"
    )
