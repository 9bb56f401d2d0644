"""`penstock compare`: how long schedules take, how much they idle and hold, side by side under the same costs."""

from argparse import ArgumentParser, Namespace

from penstock.cli.arguments import add_format, add_schedules
from penstock.cli.memory_limit import add_memory_limit, memory_limit_of
from penstock.cli.pictures import (
    CHARTS,
    add_picture_arguments,
    refuse_useless,
    result_path,
    wanted_format,
    write_result,
)
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError

SUMMARY = "Compare schedules: makespan, bubble, memory and messages under given costs."
FORMAT_OF_SUFFIX = {".txt": "table", ".json": "json", ".svg": "svg", ".png": "png", ".html": "html", ".htm": "html"}


def add_arguments(parser: ArgumentParser) -> None:
    add_schedules(parser)
    parser.add_argument(
        "--costs",
        default="F=1,I=1,W=1",
        metavar="COSTS",
        help="seconds of all that a rank does for one microbatch, so that every schedule does equal work: F=1,I=1,W=1 "
        "(the default), B=2 if that is not I + W, transfer=0.1 between ranks, overlap=0.8 times the sum for actions "
        "that overlap; or a TOML or JSON file: the same, per stage, or per layer (`penstock profile`)",
    )
    parser.add_argument(
        "--per-action",
        action="store_true",
        help="COSTS are those of one action of one stage and slice, so a schedule with more stages does more work",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="compare at several sizes: microbatches=8..64 doubles, 8..64:8 counts in steps, 8,16,24 are these; so do "
        "ranks, stages_per_rank, slices and memory_limit; may be repeated",
    )
    add_memory_limit(parser)
    add_format(
        parser,
        ("table", "json", *CHARTS),
        "default: table, or by the suffix of PATH. svg, png, html: step time against memory as a picture",
    )
    add_picture_arguments(parser)


def run(arguments: Namespace) -> int:
    from penstock.cli.comparison import Comparison, basis_of, compare
    from penstock.cli.comparison_result import result_of
    from penstock.cli.output import complain, stdout_screen
    from penstock.cli.sweep import LIMITS, read_sweep, swept_schedules
    from penstock.simulation import LayerCosts
    from penstock.simulation.costs.file import load_costs
    from penstock.tables import NO_SCREEN

    format = wanted_format(arguments, FORMAT_OF_SUFFIX, "table")
    refuse_useless(arguments, "theme", format, CHARTS)
    path = result_path(arguments)
    costs = load_costs(arguments.costs)
    if arguments.per_action and isinstance(costs, LayerCosts):
        raise ConfigError(f"{arguments.costs} has costs per layer, not per action; leave it out", key="--per-action")
    sweep = read_sweep(arguments.sweep)
    arguments.memory_limit = memory_limit_of(arguments, costs.activation_bytes)
    for limit in sweep.get(LIMITS, ()):
        limit.require_sizes(costs.activation_bytes, "--sweep")
    found = [compare(wanted, costs, per_action=arguments.per_action) for wanted in swept_schedules(arguments, sweep)]
    is_useless = not any(isinstance(row, Comparison) for row in found)
    if format == "json" or not is_useless:
        basis = basis_of(costs, arguments.costs, per_action=arguments.per_action)
        screen = NO_SCREEN if path else stdout_screen()
        sizes = {key: values for key, values in sweep.items() if key != LIMITS}
        limits = sweep.get(LIMITS, ())
        result = result_of(found, format, arguments, swept_limits=limits, swept_sizes=sizes, basis=basis, screen=screen)
        write_result(result, format, path)
    refused = [row for row in found if not isinstance(row, Comparison)]
    if is_useless:
        reasons = [f"\n  {row.name}: {row.reason}" for row in refused]
        complain("none of these schedules can be compared" + "".join(reasons))
        return ExitStatus.WRONG_INPUT
    for row in refused if format in CHARTS else ():
        complain(f"{row.name} is not in the picture: {row.reason}")
    return ExitStatus.FINE
