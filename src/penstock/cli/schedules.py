"""`penstock schedules`: a line on every family of schedules, or all about one of them."""

from argparse import ArgumentParser, Namespace

from penstock.cli.arguments import add_format
from penstock.cli.output import complain, say, stdout_screen
from penstock.cli.status import ExitStatus

SUMMARY = "List every family of schedules, or tell all about one."


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a family, to read all about it (default: all, in a table)"
    )
    add_format(
        parser,
        ("text", "markdown"),
        "default: text. markdown: how to choose, all about every family, and how to write your own",
        default="text",
    )


def run_command(arguments: Namespace) -> int:
    from penstock.cli.handbook import family_text, handbook, table_page
    from penstock.schedules import FAMILIES, find_family, installed_families

    screen = stdout_screen()
    if arguments.name is not None:
        say(family_text(find_family(arguments.name), screen=screen, as_markdown=arguments.format == "markdown"))
        return ExitStatus.FINE
    installed, problems = installed_families()
    for problem in problems:
        complain(problem)
    families = [*FAMILIES.values(), *installed.values()]
    say(handbook(families) if arguments.format == "markdown" else table_page(families, screen))
    return ExitStatus.FINE
