"""`penstock generate`: let the model of a run write on after a prompt."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from penstock.cli.output import say_piece
from penstock.cli.run_file import add_run_folder, config_of_folder
from penstock.cli.status import ExitStatus

SUMMARY = "Write on after a prompt, with the weights of a run, or of its newest checkpoint."


def add_arguments(parser: ArgumentParser) -> None:
    add_run_folder(parser, "model.source")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    parser.add_argument("--tokens", type=int, metavar="N", help="most tokens that are added (default: sample.tokens)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="divides the logits before a token is drawn; 0: always the likeliest (default: sample.temperature)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="of how many of the likeliest tokens one is drawn; 0: of all (default: sample.top_k)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="one is drawn of the likeliest tokens whose probabilities together come to P; 1: of all "
        "(default: sample.top_p)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws (default: run.seed)")


def run_command(arguments: Namespace) -> int:
    from penstock.errors import ConfigError
    from penstock.train.data.tokenizer import tokenizer_of
    from penstock.train.generation import load_trained, obstacle_to_sampling, prompt_tokens, sample

    config = _config_of(arguments)
    prompt = prompt_tokens(tokenizer_of(config), arguments.prompt, key="--prompt")
    with load_trained(config) as pipeline:
        obstacle = obstacle_to_sampling(config, pipeline)
        if obstacle:
            raise ConfigError(f"{config.model.place} writes no text: {obstacle}", key=config.model.place_key)
        say_piece(arguments.prompt)
        for piece in sample(config, pipeline, prompt):
            say_piece(piece)
    say_piece("\n")
    return ExitStatus.FINE


def _config_of(arguments: Namespace) -> Any:
    """Read the run's configuration, with the settings of the command line in place of its own."""
    from penstock.train.model_source import KEY, require_named_code
    from penstock.train.settings.config import load_config

    path = config_of_folder(Path(arguments.run_folder))
    overrides = {
        "run.seed": arguments.seed,
        "sample.tokens": arguments.tokens,
        "sample.temperature": arguments.temperature,
        "sample.top_k": arguments.top_k,
        "sample.top_p": arguments.top_p,
    }
    config = load_config(path, [f"{key}={value}" for key, value in overrides.items() if value is not None])
    require_named_code(config, arguments.functions, runs=[KEY])  # no loss, and none of its data
    run = config.run.model_copy(update={"folder": arguments.run_folder})
    return config.model_copy(update={"run": run})
