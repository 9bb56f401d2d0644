"""`penstock check`: prove a schedule file, or say everything that is wrong with it."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.cli.arguments import add_memory_limit, add_split, memory_limit_of
from penstock.cli.output import say, stdout_screen
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError

SUMMARY = "Prove a schedule file, or say everything that is wrong with it."


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="CSV (actions alone, or with communication), JSON or a grid; - is stdin"
    )
    parser.add_argument("--ranks", type=int, metavar="P", help="how many ranks the file must be for")
    parser.add_argument(
        "--transport",
        metavar="MODEL",
        help="prove the program under posted (default), rendezvous, pair_fifo, coalesced, or all; a "
        "schedule is lowered for it first",
    )
    parser.add_argument("--costs", metavar="COSTS", help="how large activations and all else are, for a limit in bytes")
    add_split(parser)
    add_memory_limit(parser)
    parser.add_argument(
        "--weight-order",
        action="store_true",
        help="prove also that every stage's W come in the order of its I, as fused layers need",
    )


def run_command(arguments: Namespace) -> int:
    """Run `penstock check`: prove that the schedule or program in a file can run; print what was proved.

    A schedule is also lowered to a program (with its messages) and proved again, if a transport or costs are given,
    since only a program has messages.

    Raises:
        ScheduleError: with every violation. ConfigError, FormatError: for arguments or a file that do not fit.
    """
    from penstock.cli.conversion import describe_plan, read_plan
    from penstock.cli.given_costs import costs_of_table
    from penstock.ir.program import Program
    from penstock.ir.transports import POSTED
    from penstock.lowering import lower
    from penstock.proofs import check

    file = "<stdin>" if arguments.file == "-" else arguments.file
    plan = read_plan(read_text(arguments.file), file=file, name=file)
    if arguments.ranks not in (None, plan.num_ranks):
        raise ConfigError(
            f"{file} is for {plan.num_ranks} ranks, not {arguments.ranks}; pass --ranks {plan.num_ranks}, "
            "or a file with one line per rank",
            key="--ranks",
        )
    if arguments.split is not None and arguments.costs is None:
        raise ConfigError("there are no costs to split; give --costs FILE with costs per layer", key="--split")
    costs, split = (None, "") if arguments.costs is None else costs_of_table(arguments, arguments.costs, plan)
    limit = memory_limit_of(arguments, None if costs is None else costs.activation_bytes)
    demands = {"costs": costs, "memory_limit": limit, "weight_order": arguments.weight_order}
    transport = arguments.transport or str(POSTED)
    facts = check(plan, transport, **demands)
    if (arguments.transport or costs is not None) and not isinstance(plan, Program):
        # Only a program has messages, which travel and take memory.
        plan = lower(plan, transport)
        facts = check(plan, transport, **demands)
    transports = f"; ends under {', '.join(facts.transports)}" if facts.transports else ""
    split = f"; {split}" if split else ""
    say(stdout_screen().wrapped(f"ok: {describe_plan(plan, facts)}{split}{transports}"))
    return ExitStatus.FINE


def read_text(name: str) -> str:
    """Return the text of a file, or of standard input for `-`. Raises: ConfigError where it cannot be read."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        plans = [file for file in map(Path(name).joinpath, ("timeline.json", "schedule.csv")) if file.is_file()]
        fix = f", such as {plans[0]}" if plans else ""  # `name` is a run folder
        raise ConfigError(
            f"{name}: cannot be read ({error.strerror}). Give the path of a schedule file{fix}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: byte {error.start} is not UTF-8 text. Give a CSV or JSON schedule file") from error
