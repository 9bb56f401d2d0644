"""`penstock show`: a schedule, or the program it is lowered to, as a grid, CSV or JSON."""

from argparse import ArgumentParser, Namespace

from penstock.cli.command import Command
from penstock.cli.output import say
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a family; `penstock schedules` lists them")
    parser.add_argument("--ranks", type=int, required=True, metavar="P", help="number of ranks")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="number of microbatches")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="stages on each rank (default: the family's)")
    parser.add_argument("--stages", type=int, metavar="S", help="all stages, where it is no multiple of the ranks")
    parser.add_argument("--slices", type=int, default=1, metavar="K", help="slices of each sequence (default 1)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a knob of the family; may be repeated"
    )
    parser.add_argument("--forward-only", action="store_true", help="the forwards alone, as in evaluation")
    parser.add_argument("--lowered", action="store_true", help="the program: with sends, receives and reductions")
    parser.add_argument("--format", choices=("grid", "csv", "json"), default="grid", help="default: grid")


def run(arguments: Namespace) -> int:
    from penstock.ir.grid import to_grid
    from penstock.lower import lower
    from penstock.schedules import build

    schedule = build(
        arguments.name,
        ranks=arguments.ranks,
        microbatches=arguments.microbatches,
        stages_per_rank=arguments.stages_per_rank,
        stages=arguments.stages,
        slices=arguments.slices,
        forward_only=arguments.forward_only,
        **parse_options(arguments.option),
    )
    plan = lower(schedule) if arguments.lowered else schedule
    writers = {"grid": lambda: to_grid(plan), "csv": plan.to_csv, "json": plan.to_json}
    say(writers[arguments.format]())
    return ExitStatus.FINE


def parse_options(texts: list[str]) -> dict[str, str]:
    """Read `key=value` texts. Raises: ConfigError for a text of another form, and for a key given twice."""
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        name = key.replace("-", "_")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--option {text!r} is not of the form key=value, such as --option warmup=eager")
        if name in options:
            raise ConfigError(f"--option {name} is given twice; keep one")
        options[name] = value
    return options


COMMAND = Command("show", "Print a schedule, or the program it is lowered to.", add_arguments, run)
