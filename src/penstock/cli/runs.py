"""`penstock runs`: runs side by side, as a table or as curves."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from penstock.cli.arguments import add_format
from penstock.cli.output import complain, say, stdout_screen
from penstock.cli.pictures import TABLE, add_picture_arguments, refuse_useless, result_path, wanted_format, write_result
from penstock.cli.status import ExitStatus

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
    add_format(parser, (TABLE, "json", *CURVES), text)
    add_picture_arguments(parser)


def run(arguments: Namespace) -> int:
    from penstock.train.watching.run_list import list_runs

    format = wanted_format(arguments, SUFFIXES | {".json": "json"}, TABLE)
    refuse_useless(arguments, "theme", format, CURVES)
    path = result_path(arguments)
    found = list_runs(arguments.names)
    for problem in found.unreadable:
        complain(problem)
    runs = found.runs
    if format in CURVES:
        data = _curves(runs, arguments, format)
    elif format == "json":
        data = _json(runs)
    else:
        text = _table(runs, in_terminal=path is None)
        if path is None:
            say(text)
            return ExitStatus.FINE
        data = f"{text}\n".encode()
    write_result(data, format, path)
    return ExitStatus.FINE


def _table(runs: Any, *, in_terminal: bool) -> str:
    from penstock.show.text import format_bytes
    from penstock.tables import NO_SCREEN, Column, table_text
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
            _shortened(settings),
        ]
        for each, settings in zip(runs, found, strict=True)
    ]
    if not any(found):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table_text(columns, rows, stdout_screen() if in_terminal else NO_SCREEN)


def _shown(value: float | None, format: str) -> str:
    return "-" if value is None else f"{value:{format}}"


def _shortened(settings: Sequence[str]) -> str:
    more = f" and {len(settings) - MOST_SHOWN} more" if len(settings) > MOST_SHOWN else ""
    return " ".join(settings[:MOST_SHOWN]) + more


def _json(runs: Any) -> bytes:
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
    return orjson.dumps(rows, option=orjson.OPT_INDENT_2) + b"\n"


def _curves(runs: Any, arguments: Namespace, format: str) -> bytes:
    from penstock.show.run_curves import RunCurve, run_curves
    from penstock.train.watching.run_list import differences

    curves = [
        RunCurve(
            each.name, each.curve("loss"), each.curve("held_out_loss"), each.curve("tokens_per_s"), _shortened(own)
        )
        for each, own in zip(runs, differences(runs), strict=True)
    ]
    [place, *more] = arguments.names
    title = f"{len(runs)} runs" if more else f"Runs in {place}"
    return run_curves(curves, title, format=format, theme=arguments.theme)
