"""`penstock train`: train a run, on ranks started here or as one of the ranks that torchrun started."""

import sys
from argparse import Namespace
from typing import Any

from penstock.cli.command import Command
from penstock.cli.run_file import add_run_arguments, run_on_ranks


def run(arguments: Namespace) -> int:
    return run_on_ranks(arguments, ["train"], _train)


def _train(config: Any) -> None:
    from penstock.train.loop import train

    train(config, output=sys.stdout)


COMMAND = Command(
    "train", "Train a run; starts its ranks on this machine, or joins torchrun's.", add_run_arguments, run
)
