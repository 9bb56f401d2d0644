"""`penstock verify`: compare a cut model with the unsplit one, and name the first tensor that differs."""

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.arguments import add_repeated
from penstock.cli.output import say, stdout_screen
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError, described, listed, nearest

SUMMARY = "Compare a cut model with the unsplit one, and name the first tensor that differs."
RUN_FILE = ".toml"
NAMED = ("model", "points_or_layers")
"""Names of the positional arguments of `verify` before its batches."""
BATCHES = "batches"
OPTIONS = ("loss", "schedule", "ranks", "microbatches", "tolerance")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="RUN.toml, whose model.transformers is compared on its first batch; or FILE:FUNCTION, which returns "
        "(model, points, *batches), or a dict of the arguments of penstock.verify",
    )
    add_repeated(parser, "--set", "KEY=VALUE", "set a key of RUN.toml, such as model.dtype=float64; may be repeated")


def run_command(arguments: Namespace) -> int:
    """Run `penstock verify`: print the report; the status is 1 where something differs or is refused."""
    report = _of_run(arguments) if arguments.target.endswith(RUN_FILE) else _of_function(arguments)
    say(report.text(stdout_screen()))
    return ExitStatus.FINE if report.is_right else ExitStatus.WRONG_INPUT


def _of_run(arguments: Namespace) -> Any:
    from penstock.train.data.dataset import open_dataset
    from penstock.train.data.user_data import UserDataset
    from penstock.train.model_check import verify_run
    from penstock.train.settings.config import load_config
    from penstock.train.setup import check_plan

    config = load_config(arguments.target, arguments.set)
    check_plan(config)
    with tempfile.TemporaryDirectory() as folder:
        dataset = UserDataset(config) if config.data.source else open_dataset(config, Path(folder))
        return verify_run(config, dataset)


def _of_function(arguments: Namespace) -> Any:
    from penstock.schedules.third_party import run_third_party
    from penstock.train.settings.user_function import load_function
    from penstock.verifying.verify import verify

    place = arguments.target
    if arguments.set:
        raise ConfigError(f"{arguments.set[0]} sets a key of a run file, and {place} is a function", key="--set")
    returned: object = run_third_party(place, load_function(place, "TARGET"))
    if isinstance(returned, Mapping):
        model, points_or_layers, batches, options = _by_name(returned, place)
    elif isinstance(returned, tuple | list) and len(returned) > len(NAMED):
        model, points_or_layers, *batches = returned
        options = {}
    else:
        raise ConfigError(
            f"{place} returned {described(returned)}; expected (model, points, *batches), or a dict with "
            f"{', '.join((*NAMED, BATCHES))}",
            key="TARGET",
        )
    return verify(model, points_or_layers, *batches, **options)


def _by_name(returned: Mapping[Any, Any], place: str) -> tuple[Any, Any, list[Any], dict[str, Any]]:
    known = (*NAMED, BATCHES, *OPTIONS)
    if unknown := [name for name in returned if name not in known]:
        hint = nearest(str(unknown[0]), known)
        raise ConfigError(
            f"{place} returned a dict with {unknown[0]!r}; expected some of {', '.join(known)}.{hint}", key="TARGET"
        )
    if missing := [name for name in (*NAMED, BATCHES) if name not in returned]:
        raise ConfigError(f"{place} returned a dict without {listed(missing)}; add it", key="TARGET")
    options = {name: returned[name] for name in OPTIONS if name in returned}
    return returned[NAMED[0]], returned[NAMED[1]], list(returned[BATCHES]), options
