"""`penstock compare`: how long schedules take, how much they idle and hold, side by side under the same costs."""

from argparse import ArgumentParser, Namespace

from penstock.cli.arguments import (
    LIMIT,
    add_heavy,
    add_memory_limit,
    add_repeated,
    add_schedules,
    add_sharding,
    add_split,
)
from penstock.cli.pictures import TABLE, TABLE_SUFFIXES, Output, add_result_arguments
from penstock.cli.status import ExitStatus
from penstock.show import CHARTS

SUMMARY = "Compare schedules: makespan, bubble, memory and messages under given costs."


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock compare`: schedules, what they are simulated with, and the form of the result."""
    add_schedules(parser)
    parser.add_argument(
        "--costs",
        default="F=1,I=1,W=1",
        metavar="COSTS",
        help="seconds of all that a rank does for one microbatch, so that every schedule does equal work: F=1,I=1,W=1 "
        "(the default), F=1,1,1,2 for each rank, "
        "B=2 if that is not I + W, transfer=0.1 between ranks, overlap=0.8 times the sum for actions "
        "that overlap; or a TOML or JSON file: the same, per stage, or per layer (`penstock profile`)",
    )
    add_heavy(parser)
    add_split(parser)
    add_sharding(parser)
    parser.add_argument(
        "--per-action",
        action="store_true",
        help="COSTS are those of one action of one stage and slice, so a schedule with more stages does more work",
    )
    add_repeated(
        parser,
        "--sweep",
        "KEY=VALUES",
        "compare at several sizes: microbatches=8..64 doubles, 8..64:8 counts in steps, 8,16,24 are these; so do "
        "ranks, stages_per_rank, slices, memory_limit, data, residency and look_ahead, and shard=none,full; may be "
        "repeated",
    )
    add_memory_limit(parser, f"{LIMIT}. Costs per layer are split so that they fit, unless --split is given")
    add_result_arguments(
        parser,
        (TABLE, "json", *CHARTS),
        "default: table, or by the suffix of PATH. svg, png, html: step time against memory as a picture",
    )


def run_command(arguments: Namespace) -> int:
    from penstock.cli.comparison import compared_by, grouped_refusals, to_json, to_picture, to_table
    from penstock.cli.output import complain

    output = Output.of(arguments, TABLE_SUFFIXES, TABLE, {"theme": CHARTS})
    compared = compared_by(arguments)
    if output.format == "json":
        output.write(to_json(compared))
    if not compared.comparisons:
        reasons = [f"\n  {names}: {reason}" for names, reason in grouped_refusals(compared.refusals)]
        complain("none of these schedules can be compared" + "".join(reasons))
        return ExitStatus.WRONG_INPUT
    if output.format == TABLE:
        output.write(to_table(compared, output.screen))
    if output.format in CHARTS:
        shape = {"rank": arguments.ranks, "microbatch": arguments.microbatches}
        output.write(to_picture(compared, shape, format=output.format, theme=arguments.theme))
        for names, reason in grouped_refusals(compared.refusals):
            complain(f"not in the picture: {names}: {reason}")
    return ExitStatus.FINE
