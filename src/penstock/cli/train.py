"""`penstock train`: train a run, on ranks started here or as one of the ranks that torchrun started."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from penstock.cli.lifetime import launcher_of
from penstock.cli.output import say
from penstock.cli.run_file import add_run_arguments, is_rank, run_on_ranks

SUMMARY = "Train a run; starts its ranks on this machine, or joins torchrun's."


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume", action="store_true", help="continue a run from its newest checkpoint, or fail where there is none"
    )
    start.add_argument("--fresh", action="store_true", help="always begin in the next folder of DIR, DIR-2, DIR-3, ...")
    start.add_argument(
        "--force", action="store_true", help="remove what earlier runs left in run.folder, and begin there"
    )


def run_command(arguments: Namespace) -> int:
    from penstock.train.stopping import StopRequest

    flags = [f"--{name}" for name in ("resume", "fresh", "force") if getattr(arguments, name)]
    stop = StopRequest()
    body = partial(_train, arguments, stop)
    return run_on_ranks(arguments, ["train", *flags], body, partial(_hold_folder, arguments), stop)


def _train(arguments: Namespace, stop: Any, config: Any) -> None:
    from penstock.train.loop import train

    is_claimed = not is_rank(os.environ) or launcher_of(os.environ) is not None
    train(config, output=sys.stdout, start=_start_of(arguments), is_claimed=is_claimed, stop=stop)


@contextmanager
def _hold_folder(arguments: Namespace, config: Any) -> Iterator[Any]:
    """Hold the run's folder while its ranks run, and tidy it up after them."""
    from penstock.train.claim import claimed
    from penstock.train.data.chat_template import require_chat_template
    from penstock.train.data.tokenizer import tokenizer_of
    from penstock.train.folder.run_folder import RunFolder, run_path
    from penstock.train.settings.optional_packages import require_packages
    from penstock.train.setup import with_digests

    require_packages(config)
    tokenizer_of(config)
    require_chat_template(config)
    config = with_digests(config)
    with claimed(config, _start_of(arguments)) as (config, note):
        folder = RunFolder(run_path(config.run.folder))
        say(note, at_once=True)
        try:
            yield config
        except KeyboardInterrupt:
            with suppress(OSError):
                say(folder.describe_interruption())
            raise
        finally:
            folder.sweep()


def _start_of(arguments: Namespace) -> Any:
    from penstock.train.claim import Start

    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if arguments.force:
        return Start.RESTART if is_restarted else Start.FORCE
    if arguments.fresh and not is_restarted:  # else the first try has taken the next folder
        return Start.FRESH
    return Start.RESUME if arguments.resume else Start.BY_RULE
