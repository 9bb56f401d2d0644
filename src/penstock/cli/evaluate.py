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
        help="a text file, or a folder of such, to evaluate on as a whole; chats for a run on chats (default: what the "
        "run held out, "
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


def run_command(arguments: Namespace) -> int:
    from penstock.train.folder.run_folder import CONFIG
    from penstock.train.model_source import require_named_code
    from penstock.train.settings.config import load_config

    folder = Path(arguments.run_folder)
    path = config_of_folder(folder.parent if folder.name == CONFIG else folder)  # ranks started here get the file
    command = ["evaluate", f"--to={arguments.format}", *(f"--function={place}" for place in arguments.functions)]
    command += [] if arguments.data is None else [f"--data={arguments.data}"]
    command += [] if arguments.checkpoint is None else [f"--checkpoint={arguments.checkpoint}"]
    if launcher_of(os.environ) is None:  # a rank that Penstock's launcher started gets these settings by its command
        arguments.set = [*arguments.set, *_settings(arguments, path.parent, load_config(path, arguments.set).data)]
    arguments.run_file = str(path)
    require_named_code(load_config(path, arguments.set), arguments.functions)
    is_quiet = arguments.format == "json"
    # Nothing is held: an evaluation leaves a run as it is, and may read one that goes on.
    return run_on_ranks(arguments, command, partial(_evaluate, arguments), nullcontext, is_quiet=is_quiet)


def _settings(arguments: Namespace, folder: Path, data: Any) -> list[str]:
    """Return the settings of an evaluation that differ from the run's, as KEY=VALUE; `data` are those of the run."""
    import tomlkit

    from penstock.train.run_evaluation import checkpoint_of

    def quoted(value: object) -> str:
        return tomlkit.string(str(value)).as_string()

    weights = folder if arguments.checkpoint is None else checkpoint_of(folder, arguments.checkpoint)
    # One replica is enough to run forwards alone.
    settings = [f"run.folder={quoted(folder)}", f"checkpoint.load={quoted(weights)}", "parallel.data=1"]
    if arguments.data is None:
        return settings
    whole_text = ["data.sources=[]", 'data.source=""']
    if not (data.has_chats and not data.sources):  # chats are read as those of the run
        whole_text += ["data.corpus=files", "data.column=text", "data.learn=all", 'data.chat_template=""']
    no_held_out = ["data.held_out_fraction=0", "run.evaluate_batches=0", "run.evaluate_every=0", "run.patience=0"]
    return [*settings, f"data.files=[{quoted(arguments.data)}]", *whole_text, *no_held_out]


def _evaluate(arguments: Namespace, config: Any) -> None:
    from penstock.cli.output import say
    from penstock.train.run_evaluation import evaluate_run

    evaluation = evaluate_run(config, sys.stderr, is_whole=arguments.data is not None)
    if evaluation.rank == 0:
        say(_as_json(evaluation, arguments) if arguments.format == "json" else _as_text(evaluation, arguments))


def _as_text(evaluation: Any, arguments: Namespace) -> str:
    text = "held-out text" if arguments.data is None else arguments.data
    perplexity = "" if evaluation.perplexity is None else f", perplexity {evaluation.perplexity:.4g}"
    batches = count_of(evaluation.num_batches, "batch")
    size = f"{evaluation.num_targets:,} tokens, {batches}"
    return f"{evaluation.weights}: loss {evaluation.loss:.4f}{perplexity} on {text} ({size})"


def _as_json(evaluation: Any, arguments: Namespace) -> str:
    import orjson

    row = {
        "weights": str(evaluation.weights),
        "step": evaluation.step,
        "data": arguments.data,
        "loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "num_tokens": evaluation.num_targets,
        "num_batches": evaluation.num_batches,
    }
    return orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()
