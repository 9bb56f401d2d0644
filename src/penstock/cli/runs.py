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
"""Settings of a run; JSON has all."""
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


def run(arguments: Namespace) -> int:
    from penstock.train.watching.run_list import list_runs

    output = Output.of(arguments, SUFFIXES | {".json": "json"}, TABLE, {"theme": CURVES})
    found, unreadable = list_runs(arguments.names)
    for problem in unreadable:
        complain(problem)
    if output.format in CURVES:
        output.write(_curves(found, arguments, output.format))
    else:
        output.write(_json(found) if output.format == "json" else _table(found, output.screen))
    return ExitStatus.FINE


def _table(runs: Any, screen: Screen) -> str:
    from penstock.show.text import format_bytes
    from penstock.train.watching.run_list import differences

    found = differences(runs)
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
            each.name,
            each.state,
            str(each.step),
            str(each.config.run.steps),
            _shown(each.last("loss"), ".4f"),
            _shown(each.last("held_out_loss"), ".4f"),
            _shown(each.tokens_per_s, ",.0f"),
            _shown(each.last("bubble_fraction"), ".1%"),
            format_bytes(int(max(each.peak_bytes))) if each.peak_bytes else "-",
            listed(settings, MOST_SHOWN, separator=" "),
        ]
        for each, settings in zip(runs, found, strict=True)
    ]
    if not any(found):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table_text(columns, rows, screen)


def _shown(value: float | None, format: str) -> str:
    return "-" if value is None else f"{value:{format}}"


def _json(runs: Any) -> str:
    import orjson

    rows = [
        {
            "name": each.name,
            "folder": str(each.folder),
            "state": each.state,
            "step": each.step,
            "num_steps": each.config.run.steps,
            "loss": each.last("loss"),
            "held_out_loss": each.last("held_out_loss"),
            "tokens_per_s": each.tokens_per_s,
            "bubble_fraction": each.last("bubble_fraction"),
            "predicted_bubble_fraction": each.last("predicted_bubble_fraction"),
            "model_flops_utilization": each.last("model_flops_utilization"),
            "peak_bytes": each.peak_bytes,
            "config": each.config.model_dump(mode="json"),
        }
        for each in runs
    ]
    return orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode()


def _curves(runs: Any, arguments: Namespace, format: str) -> bytes:
    from penstock.show.run_curves import RunCurve, run_curves
    from penstock.train.watching.run_list import differences

    curves = [
        RunCurve(
            each.name,
            each.curve("loss"),
            each.curve("held_out_loss"),
            each.curve("tokens_per_s"),
            listed(own, MOST_SHOWN, separator=" "),
        )
        for each, own in zip(runs, differences(runs), strict=True)
    ]
    [place, *more] = arguments.names
    title = f"{len(runs)} runs" if more else f"Runs in {place}"
    return run_curves(curves, title, format=format, theme=arguments.theme)
