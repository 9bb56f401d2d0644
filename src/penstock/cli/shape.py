"""The arguments that describe the shape of a schedule, the same for every command; nothing heavy is imported for them."""

from argparse import ArgumentParser


def add_shape_arguments(parser: ArgumentParser) -> None:
    """Add what every command takes that builds schedules by name."""
    parser.add_argument("--ranks", type=int, required=True, metavar="P", help="number of ranks")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="number of microbatches")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="stages on each rank (default: the family's)")
    parser.add_argument("--stages", type=int, metavar="S", help="all stages, where it is no multiple of the ranks")
    parser.add_argument("--slices", type=int, default=1, metavar="K", help="slices of each sequence (default 1)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a knob of the family; may be repeated"
    )
    parser.add_argument("--forward-only", action="store_true", help="the forwards alone, as in evaluation")
