"""Commands that run something on the ranks of a run file: started here, or as one of the ranks of torchrun."""

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from penstock.cli.arguments import add_repeated
from penstock.cli.lifetime import (
    die_with,
    end_when_told,
    interrupts_handled_by,
    launcher_of,
    leave_at_once,
    stop_or_raise,
)
from penstock.cli.output import complain, forget_stdout, say
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError, PenstockError
from penstock.train.stopping import StopRequest, refusing_exit

MAX_PORT = 65535

Body = Callable[[Any], None]
"""A function that every rank calls with the `RunConfig`; torch.distributed is initialized for several ranks."""
Hold = Callable[[Any], AbstractContextManager[Any]]
"""A context that holds the run's folder while its ranks run, unless torchrun starts them; it yields their config."""


def add_run_arguments(parser: ArgumentParser) -> None:
    """Add the run file, and the arguments of `add_rank_arguments`."""
    parser.add_argument("run_file", metavar="RUN.toml", help="the configuration of the run")
    add_rank_arguments(parser)


def add_run_folder(parser: ArgumentParser, keys: str) -> None:
    """Add the folder of a run, and the option that names its code; `keys` name it in the configuration."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", help="the folder of a run")
    text = f"the code of the run's {keys}, which is run only where it is named here too; may be repeated"
    add_repeated(parser, "--function", "FILE:NAME", text, "functions")


def config_of_folder(folder: Path) -> Path:
    """Return the path of a run's configuration. Raises: ConfigError where the folder holds none."""
    from penstock.train.folder.run_folder import CONFIG

    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no {CONFIG}; give the folder of a run", key="RUN_FOLDER")
    return folder / CONFIG


def add_rank_arguments(parser: ArgumentParser) -> None:
    """Add settings that change the configuration, and the port at which its ranks meet."""
    add_repeated(parser, "--set", "KEY=VALUE", "set a key, such as batch.size=32; may be repeated")
    parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1 where the ranks meet (default: a free one)"
    )


def run_on_ranks(
    arguments: Namespace,
    command: Sequence[str],
    body: Body,
    hold: Hold,
    stop: StopRequest | None = None,
    *,
    is_quiet: bool = False,
) -> int:
    """Run `body` on every rank of a run file's pipeline, and return the exit status.

    A process that is one of several ranks already runs `body` as that rank. Otherwise the ranks are started here, each
    with `command`, or `body` runs in this process if there is one rank. `hold(config)` keeps the run's folder
    meanwhile, and yields the configuration for `body`. While `body` looks at `stop`, the first interrupt asks it to
    stop, and the next one ends it. `is_quiet` leaves standard output to `body`.

    Raises:
        ConfigError, FormatError: for a wrong run file, port or device.
    """
    if not 0 <= arguments.port <= MAX_PORT:
        raise ConfigError(f"{arguments.port} is no port; give a number from 1 to {MAX_PORT}", key="--port")
    if is_rank(os.environ):
        return _run_as_rank(arguments, body, os.environ, stop)
    with interrupts_handled_by(leave_at_once):
        if sys.stdout.isatty() and not is_quiet:  # in a pipe, the first line of a run names its folder
            say("loading torch ...", at_once=True)
        from penstock.train import devices
        from penstock.train.settings.config import load_config
        from penstock.train.setup import check_plan

        config = load_config(arguments.run_file, arguments.set)
        check_plan(config)
        devices.choose_device(config.run.device, config.num_processes, devices.look())
        if config.num_processes > 1:
            return _launch(arguments, command, config, hold, may_stop=stop is not None, is_quiet=is_quiet)
        _use_one_thread_unless(os.environ)
        try:
            with interrupts_handled_by(stop_or_raise(stop)), hold(config) as rank_config, refusing_exit():
                body(rank_config)
        except BrokenPipeError:
            forget_stdout()
            return ExitStatus.INTERRUPTED
    return ExitStatus.FINE


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process was started as one of several ranks, by torchrun or by our launcher."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def _use_one_thread_unless(environment: Mapping[str, str]) -> None:
    """Give a single rank as many threads as launched ranks get, so that the number of ranks changes no bit."""
    import torch

    if "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(1)


def _launch(
    arguments: Namespace, command: Sequence[str], config: Any, hold: Hold, *, may_stop: bool, is_quiet: bool
) -> int:
    """Start one process per rank; each runs the command again and finds its rank in the environment."""
    import tomlkit

    from penstock.cli.launch import launch_ranks

    with interrupts_handled_by(signal.default_int_handler), hold(config) as rank_config:
        folder = tomlkit.string(rank_config.run.folder).as_string()
        settings = [text for text in arguments.set if text.partition("=")[0].replace(" ", "") != "run.folder"]
        overrides = [f"--set={setting}" for setting in (*settings, f"run.folder={folder}")]
        if not is_quiet:
            say(f"starting {config.num_processes} ranks ...", at_once=True)
        words = ["-m", "penstock", *command, *overrides, "--", arguments.run_file]
        command = [sys.executable, *_path_flags(), *words]
        failure = launch_ranks(command, num_ranks=config.num_processes, port=arguments.port, may_stop=may_stop)
    if failure is None:
        return ExitStatus.FINE
    if failure.status != ExitStatus.INTERRUPTED:
        last_step = _last_step(rank_config) if failure.is_silent else []
        complain("\n".join([failure.shown, *last_step, *_way_on(arguments, rank_config)]))
    return failure.status


def _way_on(arguments: Namespace, config: Any) -> list[str]:
    """Return a line on the step that the same command continues after, if it would continue from a checkpoint."""
    from penstock.train.folder.run_folder import RunFolder

    trains = hasattr(arguments, "resume")  # profile, which runs on ranks too, has no such option
    if not trains or arguments.fresh or arguments.force:
        return []
    steps = RunFolder(Path(config.run.folder)).checkpoints.steps()
    return [f"The same command continues after step {steps[0]}"] if steps else []


def _last_step(config: Any) -> list[str]:
    """Return a line on the last step of a run that its metrics have; none where they cannot be read."""
    from penstock.train.folder.run_folder import METRICS
    from penstock.train.watching.metrics import read_metrics

    path = Path(config.run.folder) / METRICS
    with suppress(OSError, PenstockError):
        rows = read_metrics(path)
        return [f"The last step in {path} is {rows[-1]['step']:.0f} of {config.run.steps}"] if rows else []
    return []


def _path_flags() -> list[str]:
    """Return the flag -P, which hides modules in the working folder, unless this process finds modules there too."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


def _run_as_rank(arguments: Namespace, body: Body, environment: Mapping[str, str], stop: StopRequest | None) -> int:
    end_when_told(stop)
    launcher = launcher_of(environment)
    if launcher is not None:
        die_with(launcher)
    from penstock.cli.rank import run_rank

    return run_rank(lambda: _join_and_run(arguments, body, environment), environment=environment)


def _join_and_run(arguments: Namespace, body: Body, environment: Mapping[str, str]) -> None:
    from penstock.cli.launch import join_ranks, read_number
    from penstock.train.settings.config import load_config
    from penstock.train.world import check_ranks

    config = load_config(arguments.run_file, arguments.set)
    check_ranks(config, read_number(environment, "WORLD_SIZE"))
    join_ranks(environment, device=config.run.device)
    with refusing_exit():
        body(config)
