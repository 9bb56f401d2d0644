"""`penstock evaluate`: the loss of a run's weights on its held-out text, or on another one."""

import os
import sys
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cli.arguments import add_format
from penstock.cli.lifetime import launcher_of
from penstock.cli.run_file import add_rank_arguments, add_run_folder, config_of_folder, run_on_ranks
from penstock.errors import count_of

SUMMARY = "Evaluate the weights of a run, or of one of its checkpoints, on held-out text."


def add_arguments(parser: ArgumentParser) -> None:
    add_run_folder(parser, "model.source, model.loss or data.source")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a text file, or a folder of such, to evaluate on as a whole (default: what the run held out, "
        "run.evaluate_batches batches of it)",
    )
    parser.add_argument(
        "--checkpoint",
        type=int,
        metavar="STEP",
        help="of which step (default: the weights of the run, or of its newest checkpoint)",
    )
    add_rank_arguments(parser)
    add_format(parser, ("text", "json"), "default: text", default="text")


def run(arguments: Namespace) -> int:
    from penstock.train.folder.run_folder import CONFIG
    from penstock.train.model_source import require_named_code
    from penstock.train.settings.config import load_config

    folder = Path(arguments.run_folder)
    path = config_of_folder(folder.parent if folder.name == CONFIG else folder)  # ranks started here get the file
    command = ["evaluate", f"--to={arguments.format}", *(f"--function={place}" for place in arguments.functions)]
    command += [] if arguments.data is None else [f"--data={arguments.data}"]
    command += [] if arguments.checkpoint is None else [f"--checkpoint={arguments.checkpoint}"]
    if launcher_of(os.environ) is None:  # else what started this rank has done so
        arguments.set = [*arguments.set, *_settings(arguments, path.parent)]
    arguments.run_file = str(path)
    require_named_code(load_config(path, arguments.set), arguments.functions)
    is_quiet = arguments.format == "json"
    # Nothing is held: an evaluation leaves a run as it is, and may read one that goes on.
    return run_on_ranks(arguments, command, partial(_evaluate, arguments), nullcontext, is_quiet=is_quiet)


def _settings(arguments: Namespace, folder: Path) -> list[str]:
    """Return what is set otherwise than the run had it."""
    import tomlkit

    from penstock.train.run_evaluation import checkpoint_of

    def quoted(value: object) -> str:
        return tomlkit.string(str(value)).as_string()

    weights = folder if arguments.checkpoint is None else checkpoint_of(folder, arguments.checkpoint)
    # One replica is enough to run forwards alone.
    found = [f"run.folder={quoted(folder)}", f"checkpoint.load={quoted(weights)}", "parallel.data=1"]
    if arguments.data is None:
        return found
    whole = ["data.corpus=files", "data.column=text", "data.sources=[]", 'data.source=""', "data.held_out_fraction=0"]
    no_held_out = ["run.evaluate_batches=0", "run.evaluate_every=0", "run.patience=0"]
    return [*found, f"data.files=[{quoted(arguments.data)}]", *whole, *no_held_out]


def _evaluate(arguments: Namespace, config: Any) -> None:
    from penstock.cli.output import say
    from penstock.train.run_evaluation import evaluate_run

    found = evaluate_run(config, sys.stderr, is_whole=arguments.data is not None)
    if found.rank == 0:
        say(_as_json(found, arguments) if arguments.format == "json" else _as_text(found, arguments))


def _as_text(found: Any, arguments: Namespace) -> str:
    text = "held-out text" if arguments.data is None else arguments.data
    perplexity = "" if found.perplexity is None else f", perplexity {found.perplexity:.4g}"
    batches = count_of(found.num_batches, "batch")
    return f"{found.weights}: loss {found.loss:.4f}{perplexity} on {text} ({found.num_targets:,} tokens, {batches})"


def _as_json(found: Any, arguments: Namespace) -> str:
    import orjson

    row = {
        "weights": str(found.weights),
        "step": found.step,
        "data": arguments.data,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "num_tokens": found.num_targets,
        "num_batches": found.num_batches,
    }
    return orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()
