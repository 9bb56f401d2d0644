"""`penstock train`: train a run, on ranks started here or as one of the ranks that torchrun started."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from penstock.cli.lifetime import launcher_of
from penstock.cli.output import say, say_at_once
from penstock.cli.run_file import add_run_arguments, is_rank, run_on_ranks

SUMMARY = "Train a run; starts its ranks on this machine, or joins torchrun's."


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fresh", action="store_true", help="always begin in the next folder of DIR, DIR-2, DIR-3, ...")
    which.add_argument(
        "--force", action="store_true", help="remove what earlier runs left in run.folder, and begin there"
    )


def run(arguments: Namespace) -> int:
    command = ["train", *(["--fresh"] * arguments.fresh), *(["--force"] * arguments.force)]
    return run_on_ranks(arguments, command, partial(_train, arguments), partial(_hold_folder, arguments))


def _train(arguments: Namespace, config: Any) -> None:
    from penstock.train.loop import train

    is_claimed = not is_rank(os.environ) or launcher_of(os.environ) is not None
    train(config, output=sys.stdout, start=_start_of(arguments), is_claimed=is_claimed)


@contextmanager
def _hold_folder(arguments: Namespace, config: Any) -> Iterator[Any]:
    """Hold the run's folder while its ranks run, and tidy it up after them."""
    from penstock.train.claim import claimed
    from penstock.train.run_folder import RunFolder, run_path

    with claimed(config, _start_of(arguments)) as claim:
        folder = RunFolder(run_path(claim.config.run.folder))
        say_at_once(claim.note)
        try:
            yield claim.config
        except KeyboardInterrupt:
            with suppress(OSError):
                say(folder.describe_kept())
            raise
        finally:
            folder.sweep()


def _start_of(arguments: Namespace) -> Any:
    from penstock.train.claim import Start

    if arguments.force:
        return Start.FORCE
    return Start.FRESH if arguments.fresh else Start.BY_RULE
