"""The arguments that name schedules and give their shape, the same in every command; nothing heavy is imported."""

from argparse import ArgumentParser

NAME = (
    "a family (`penstock schedules` lists them), with its own options as NAME:key=value,key=value; or a schedule "
    "file, a drawn grid included, whose own communication is left out; - is stdin"
)
FROM = "a schedule of your own: the function FUNCTION in the Python file PATH.py makes it"


def add_one_schedule(parser: ArgumentParser) -> None:
    """Add the name of one schedule, and its shape."""
    parser.add_argument("name", metavar="NAME", nargs="?", help=NAME)
    parser.add_argument("--from", dest="own", metavar="PATH.py:FUNCTION", help=f"instead of NAME, {FROM}")
    add_shape_arguments(parser)


def add_schedules(parser: ArgumentParser) -> None:
    """Add the names of several schedules, and the shape that all of them get."""
    parser.add_argument("names", metavar="NAME", nargs="*", help=NAME)
    parser.add_argument(
        "--from",
        dest="own",
        action="append",
        default=[],
        metavar="PATH.py:FUNCTION",
        help=f"besides the NAMEs, {FROM}; may be repeated",
    )
    add_shape_arguments(parser)


def add_shape_arguments(parser: ArgumentParser) -> None:
    """Add what every command takes that builds schedules by name; whether a number is needed depends on the name."""
    parser.set_defaults(wrong_usage=parser.error)
    parser.add_argument("--ranks", type=int, metavar="P", help="number of ranks; a file has its own")
    parser.add_argument("--microbatches", type=int, metavar="M", help="number of microbatches; a file has its own")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="stages on each rank (default: the family's)")
    parser.add_argument("--stages", type=int, metavar="S", help="all stages, where it is no multiple of the ranks")
    parser.add_argument("--slices", type=int, metavar="K", help="slices of each sequence (default 1)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a knob of the family; may be repeated"
    )
    parser.add_argument("--forward-only", action="store_true", help="the forwards alone, as in evaluation")
