"""`penstock show`: a schedule as text, lowered or not, in some format, or its timeline as a picture."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.arguments import add_heavy, add_one_schedule, add_sharding, add_split
from penstock.cli.pictures import Output, add_result_arguments, refuse_useless
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError, count_of
from penstock.ir.formats import FORMAT_OF_SUFFIX, WRITABLE
from penstock.show import CHARTS, PICTURES, SUFFIXES

SUMMARY = "Print a schedule, or the program it is lowered to, or draw its timeline, or a recorded step's."
OF_SCHEDULES = (
    "function", "ranks", "microbatches", "stages_per_rank", "stages", "slices", "forward_only", "options", "costs",
    "heavy", "split", "data", "shard", "residency", "look_ahead",
)  # fmt: skip
"""The arguments that a recorded step does not take."""
DEFAULT_COSTS = "F=1,I=1,W=1"
FORMAT_HELP = (
    "default: grid, or by the suffix of PATH. svg, png: the timeline as a chart; html: as a page to zoom and point at; "
    "trace: for Perfetto. deepspeed: the instruction streams of DeepSpeed, always with communication; deepspeed-old: "
    "what they were before it sent gradients first; megatron: the schedule table of Megatron-LM"
)


def add_arguments(parser: ArgumentParser) -> None:
    add_one_schedule(parser)
    parser.add_argument("--lowered", action="store_true", help="the program: with sends, receives and reductions")
    parser.add_argument(
        "--costs",
        metavar="COSTS",
        help="of a picture: seconds per action of one stage (and slice), such as F=1,I=1,W=1,transfer=0.1 "
        f"(default: {DEFAULT_COSTS}), or a TOML or JSON file",
    )
    add_heavy(parser)
    add_split(parser)
    add_sharding(parser)
    add_result_arguments(parser, (*WRITABLE, *PICTURES), FORMAT_HELP)


def run_command(arguments: Namespace) -> int:
    """Run `penstock show`: draw a schedule, a program or a recorded step as a grid, a picture or another format.

    A grid shows the order of actions; --lowered shows the program, with messages and collectives. Pictures show times.

    Raises:
        ConfigError: for arguments that do not fit each other.
    """
    from penstock.cli.drawing import on_screen, require_readable
    from penstock.cli.given_costs import sharding_of
    from penstock.cli.output import say
    from penstock.cli.wanted import make_named_schedule
    from penstock.ir.writing import write_table
    from penstock.lowering import NOT_SHARDED, lower
    from penstock.show.picture import picture_of

    formats_of_option = {"costs": PICTURES, "heavy": PICTURES, "split": PICTURES, "theme": CHARTS}
    output = Output.of(arguments, FORMAT_OF_SUFFIX | SUFFIXES, "grid", formats_of_option)
    format = output.format
    recorded = _recorded_step(arguments)
    # Pictures show times, of a recorded step or of a simulated one.
    if format in PICTURES:
        if recorded is None:
            output.write(_picture(format, arguments))
        else:
            output.write(picture_of(recorded, format, theme=arguments.theme))
        return ExitStatus.FINE
    # Other formats show the order of actions or, with --lowered, the program.
    program = None if recorded is None else recorded.program
    schedule = make_named_schedule(arguments) if program is None else program.actions()
    refuse_useless(arguments, "data", format, PICTURES)
    sharding = sharding_of(arguments)
    if sharding != NOT_SHARDED and not arguments.lowered:
        raise ConfigError("of a program, which --lowered shows, or of a picture; add one of them", key="--shard")
    table = (program or lower(schedule, **asdict(sharding))) if arguments.lowered else schedule
    # On a screen, refuse a grid that is too large to be read.
    if arguments.format is None and output.path is None:
        require_readable(table)
    text = write_table(table, format)
    if format == "grid" and output.screen.width:
        say(on_screen(text.rstrip("\n"), output.screen))
    else:
        output.write(text.encode())
    return ExitStatus.FINE


def _recorded_step(arguments: Namespace) -> Any:
    """Return the `Timeline` that NAME is the file of; None of anything else. Raises: ConfigError, FormatError."""
    name = arguments.name
    if name is None or not name.endswith(".json") or not Path(name).is_file():
        return None
    from penstock.ir.formats.timeline_json import TIMELINE_FORMAT
    from penstock.ir.reading import MOST_BEGIN
    from penstock.ir.timeline import Timeline

    with Path(name).open("rb") as file:
        if TIMELINE_FORMAT.encode() not in file.read(MOST_BEGIN):
            return None
    for key in OF_SCHEDULES:
        if getattr(arguments, key):
            option = "--set" if key == "options" else f"--{key.replace('_', '-')}"
            raise ConfigError(
                f"{name} is a step that a run recorded, with its own shape and times; leave it out", key=option
            )
    return Timeline.load(name)


def _picture(format: str, arguments: Namespace) -> bytes:
    """Draw the predicted timeline of the lowered schedule under the costs."""
    from penstock.cli.given_costs import costs_of_replicas, costs_of_table, costs_text, sharding_of
    from penstock.cli.wanted import make_named_schedule
    from penstock.lowering import NOT_SHARDED, lower
    from penstock.show.figures import describe_shape
    from penstock.show.picture import picture_of
    from penstock.simulation import simulate

    schedule = make_named_schedule(arguments)
    text = arguments.costs or DEFAULT_COSTS
    costs, split = costs_of_table(arguments, text, schedule)
    sharding, costs = sharding_of(arguments), costs_of_replicas(arguments, costs)
    timeline = simulate(lower(schedule, **asdict(sharding)), costs)
    title = f"{describe_shape(timeline.program)}, predicted with {costs_text(arguments, text)}"
    title += f", {split}" * bool(split)
    title += f", shard {sharding.shard}" * (sharding != NOT_SHARDED)
    title += f", {count_of(costs.replicas, 'replica')}" * (arguments.data is not None)
    return picture_of(timeline, format, costs=costs, title=title, theme=arguments.theme)
