"""`penstock show`: a schedule, or the program it is lowered to, as a grid, CSV or JSON."""

from argparse import ArgumentParser, Namespace

from penstock.cli.command import Command
from penstock.cli.output import say
from penstock.cli.shape import add_shape_arguments
from penstock.cli.status import ExitStatus


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a family; `penstock schedules` lists them")
    add_shape_arguments(parser)
    parser.add_argument("--lowered", action="store_true", help="the program: with sends, receives and reductions")
    parser.add_argument("--format", choices=("grid", "csv", "json"), default="grid", help="default: grid")


def run(arguments: Namespace) -> int:
    from penstock.cli.wanted import wanted_schedule
    from penstock.ir.grid import to_grid
    from penstock.lower import lower

    schedule = wanted_schedule(arguments.name, arguments)
    plan = lower(schedule) if arguments.lowered else schedule
    writers = {"grid": lambda: to_grid(plan), "csv": plan.to_csv, "json": plan.to_json}
    say(writers[arguments.format]())
    return ExitStatus.FINE


COMMAND = Command("show", "Print a schedule, or the program it is lowered to.", add_arguments, run)
