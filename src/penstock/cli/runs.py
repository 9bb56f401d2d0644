"""`penstock runs`: runs side by side, as a table or as curves."""

from argparse import ArgumentParser, Namespace
from typing import Any

from penstock.cli.output import complain
from penstock.cli.pictures import TABLE, Output, add_result_arguments
from penstock.cli.status import ExitStatus
from penstock.errors import listed
from penstock.tables import Column, Screen, table_text

SUMMARY = "List runs side by side, or draw their losses."
CURVES = ("svg", "png")
MOST_SHOWN = 5
"""The most settings of a run that are shown; JSON has all."""
SUFFIXES = {".svg": "svg", ".png": "png"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "names",
        metavar="DIR",
        nargs="+",
        help="a run's folder, one that holds the folders of runs, or a pattern in quotes, such as 'runs/lr-*'",
    )
    text = "default: table, or by the suffix of PATH. svg, png: curves of the losses"
    add_result_arguments(parser, (TABLE, "json", *CURVES), text)


def run_command(arguments: Namespace) -> int:
    from penstock.train.watching.run_list import list_runs

    output = Output.of(arguments, SUFFIXES | {".json": "json"}, TABLE, {"theme": CURVES})
    records, unreadable = list_runs(arguments.names)
    for problem in unreadable:
        complain(problem)
    if output.format in CURVES:
        output.write(_curves(records, arguments, output.format))
    else:
        output.write(_json(records) if output.format == "json" else _table_of_runs(records, output.screen))
    return ExitStatus.FINE


def _table_of_runs(runs: Any, screen: Screen) -> str:
    """Return the table of `penstock runs`: a row per run, with its state, its last metrics and its settings."""
    from penstock.show.text import format_bytes
    from penstock.train.watching.run_list import differences

    settings_of_runs = differences(runs)
    columns = [
        Column("run", is_text=True),
        Column("state", is_text=True, drop_order=3),
        Column("step"),
        Column("of"),
        Column("loss"),
        Column("held-out loss"),
        Column("tokens/s", drop_order=1),
        Column("bubble", drop_order=2),
        Column("memory", drop_order=1),
        Column("settings that differ", is_text=True),
    ]
    rows = [
        [
            record.name,
            record.state,
            str(record.step),
            str(record.config.run.steps),
            _shown(record.last("loss"), ".4f"),
            _shown(record.last("held_out_loss"), ".4f"),
            _shown(record.tokens_per_s, ",.0f"),
            _shown(record.last("bubble_fraction"), ".1%"),
            format_bytes(int(max(record.peak_bytes))) if record.peak_bytes else "-",
            listed(settings, MOST_SHOWN, separator=" "),
        ]
        for record, settings in zip(runs, settings_of_runs, strict=True)
    ]
    if not any(settings_of_runs):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table_text(columns, rows, screen)


def _shown(value: float | None, format: str) -> str:
    return "-" if value is None else f"{value:{format}}"


def _json(runs: Any) -> str:
    import orjson

    rows = [
        {
            "name": record.name,
            "folder": str(record.folder),
            "state": record.state,
            "step": record.step,
            "num_steps": record.config.run.steps,
            "loss": record.last("loss"),
            "held_out_loss": record.last("held_out_loss"),
            "tokens_per_s": record.tokens_per_s,
            "bubble_fraction": record.last("bubble_fraction"),
            "predicted_bubble_fraction": record.last("predicted_bubble_fraction"),
            "model_flops_utilization": record.last("model_flops_utilization"),
            "peak_bytes": record.peak_bytes,
            "config": record.config.model_dump(mode="json"),
        }
        for record in runs
    ]
    return orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode()


def _curves(runs: Any, arguments: Namespace, format: str) -> bytes:
    from penstock.show.run_curves import RunCurve, run_curves
    from penstock.train.watching.run_list import differences

    curves = [
        RunCurve(
            record.name,
            record.curve("loss"),
            record.curve("held_out_loss"),
            record.curve("tokens_per_s"),
            listed(settings, MOST_SHOWN, separator=" "),
        )
        for record, settings in zip(runs, differences(runs), strict=True)
    ]
    [place, *more] = arguments.names
    title = f"{len(runs)} runs" if more else f"Runs in {place}"
    return run_curves(curves, title, format=format, theme=arguments.theme)
