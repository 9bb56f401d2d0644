"""`penstock search`: the order that takes least time under given costs and memory, and how far it is from the best."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.arguments import (
    LIMIT,
    MEMORY_LIMIT,
    add_heavy,
    add_memory_limit,
    add_repeated,
    add_split,
    memory_limit_of,
)
from penstock.cli.output import complain, path_to_write
from penstock.cli.pictures import TABLE, TABLE_SUFFIXES, Output, add_result_arguments
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError, ScheduleError, count_of
from penstock.ir.formats import FORMAT_OF_SUFFIX
from penstock.show import CHARTS

SUMMARY = "Search for the order that takes least time under given costs and memory, and bound what is possible."
PLACEMENTS = ("line", "loop", "v", "wave", "any")
OBJECTIVES = ("makespan", "span")
SCHEDULE_SUFFIXES = {suffix: name for suffix, name in FORMAT_OF_SUFFIX.items() if name in ("csv", "json", "grid")}
"""The formats that can express any order, by suffix."""
SECONDS_BETWEEN_LINES = 2.0
NOTHING_YET = "interrupted before an order was proved; nothing is written"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock search`: what is to be ordered, costs and limits, and the form of the result."""
    parser.add_argument("--ranks", type=int, metavar="P", required=True, help="number of ranks")
    parser.add_argument("--microbatches", type=int, metavar="M", required=True, help="number of microbatches")
    parser.add_argument(
        "--costs",
        default="F=1,I=1,W=1",
        metavar="COSTS",
        help="as for compare: seconds of all that a rank does for one microbatch, or a file: the same, per stage or "
        "per layer",
    )
    add_heavy(parser)
    add_split(parser)
    parser.add_argument("--per-action", action="store_true", help="COSTS are those of one action of one stage")
    parser.add_argument("--placement", choices=PLACEMENTS, default="line", help="which ranks have which stages")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="default: 1 on a line, else 2")
    parser.add_argument("--objective", choices=OBJECTIVES, default="makespan", help="what is to be short")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="how long to search each placement (default 10)"
    )
    parser.add_argument(
        "--noise",
        metavar="SHARE",
        help="choose what is shortest on average where each action takes so much more or less than COSTS say: 0.03, or "
        "measured, which takes the spreads in COSTS",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another one draws other moves (default 0)")
    add_memory_limit(parser, f"{LIMIT}. Where no order fits, costs per layer are split anew, unless --split is given")
    add_repeated(
        parser,
        "--sweep",
        "memory_limit=VALUES",
        "search within several limits, each as long as one: 8GiB..64GiB doubles, 8GiB..64GiB:8GiB counts in steps, "
        "8GiB,12GiB are these",
    )
    parser.add_argument(
        "--schedule",
        metavar="PATH",
        help="write the schedule there too, as PATH.csv or PATH.json, for all other commands",
    )
    add_result_arguments(
        parser,
        (TABLE, "json", *CHARTS),
        "default: table, or by the suffix of PATH. svg, png, html: the timeline that was found; of a sweep, step time "
        "against memory",
    )


def run_command(arguments: Namespace) -> int:
    from penstock.cli.given_costs import given_costs

    output = Output.of(arguments, TABLE_SUFFIXES, TABLE, {"theme": CHARTS})
    schedule_path = _schedule_path(arguments, output.path)
    # The search takes long, so all that could fail after it is refused before it.
    output.require_displayable()
    limits = _swept_limits(arguments)
    if output.format in CHARTS and (limits or output.format != "html"):
        from penstock.show.sheet import load_matplotlib

        load_matplotlib()
    costs = given_costs(arguments, arguments.costs)
    if limits:
        return _run_sweep(arguments, costs, limits, output)
    return _run_once(arguments, costs, output, schedule_path)


def _schedule_path(arguments: Namespace, path: Path | None) -> Path | None:
    """Return where the schedule goes, which is another file than the result's. Raises: ConfigError."""
    if arguments.schedule is None:
        return None
    schedule_path = path_to_write(arguments.schedule, is_forced=arguments.force, key="--schedule")
    if schedule_path.suffix.lower() not in SCHEDULE_SUFFIXES:
        suffixes = ", ".join(SCHEDULE_SUFFIXES)
        raise ConfigError(
            f"{arguments.schedule} has none of the suffixes {suffixes}; end it in one of them", key="--schedule"
        )
    if path is not None and path.resolve() == schedule_path.resolve():
        raise ConfigError(f"{path} is --output too; give each its own file", key="--schedule")
    return schedule_path


def _swept_limits(arguments: Namespace) -> Sequence[Any]:
    """Return the limits to search within; none without a sweep. Raises: ConfigError."""
    from penstock.cli.sweep import LIMITS, read_sweep, require_given_once

    sweep = read_sweep(arguments.sweep, (LIMITS,))
    require_given_once(arguments, sweep)
    if sweep and arguments.schedule is not None:
        problem = "a sweep finds an order for each limit"
        raise ConfigError(f"{problem}; search within one of them, with {MEMORY_LIMIT}", key="--schedule")
    return sweep.get(LIMITS, ())


def _stages_per_rank(arguments: Namespace) -> int | None:
    """Return the stages per rank of the option, or of `--split`. Raises: ConfigError, if the split does not fit."""
    from penstock.cli.given_costs import SPLIT, read_split

    if arguments.split is None:
        return arguments.stages_per_rank  # type: ignore[no-any-return]
    count, ranks = len(read_split(arguments.split)), max(int(arguments.ranks), 1)
    if count % ranks or arguments.stages_per_rank not in (None, count // ranks):
        expected = f"{arguments.stages_per_rank} on each" if arguments.stages_per_rank else "as many on each"
        raise ConfigError(
            f"{arguments.split} is for {count_of(count, 'stage')}, and {count_of(ranks, 'rank')} take {expected}; give "
            "the layers of each stage, or leave it out",
            key=SPLIT,
        )
    return count // ranks


def _search(arguments: Namespace, costs: Any, limit: Any, about: str = "") -> Any:
    """Return the `SearchResult` of one search; `about` begins each line of its progress."""
    from penstock.searching.search import search

    return search(
        costs,
        arguments.ranks,
        arguments.microbatches,
        memory_limit=limit,
        placement=arguments.placement,
        stages_per_rank=_stages_per_rank(arguments),
        per_action=arguments.per_action,
        objective=arguments.objective,
        seconds=arguments.seconds,
        noise=_noise(arguments.noise),
        seed=arguments.seed,
        progress=_ProgressLines(about),
        keeps_split=arguments.split is not None or bool(arguments.sweep),
    )


def _noise(text: str | None) -> Any:
    """Return the number, or the text where it is none, which the search refuses unless it knows it."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _costs_text(arguments: Namespace) -> str:
    from penstock.cli.given_costs import costs_text

    text = costs_text(arguments, arguments.costs)
    return f"{text} per action" if arguments.per_action else text


# ---- one search


def _run_once(arguments: Namespace, costs: Any, output: Output, schedule_path: Path | None) -> ExitStatus:
    from penstock.cli.searched import to_json, to_picture, to_table

    limit = memory_limit_of(arguments, costs.activation_bytes)
    try:
        result = _search(arguments, costs, limit)
    except KeyboardInterrupt:
        complain(NOTHING_YET)
        return ExitStatus.INTERRUPTED
    if schedule_path is not None:
        _write_schedule(result.schedule, schedule_path)
    if output.format in CHARTS:
        options = {"costs_text": _costs_text(arguments), "format": output.format, "theme": arguments.theme}
        output.write(to_picture(result, limit=limit, **options))
    else:
        output.write(to_json(result) if output.format == "json" else to_table(result, output.screen))
    _say_if_solver_is_missing([result])
    if result.was_interrupted:
        complain("interrupted; this is the best so far")
        return ExitStatus.INTERRUPTED
    return ExitStatus.FINE


def _say_if_solver_is_missing(results: Sequence[Any]) -> None:
    """Say if the exact solver could do more, but is not installed: where a problem is small enough for it."""
    from penstock.searching.exact import MOST_ACTIONS, is_installed
    from penstock.searching.problem import PLANES

    def is_small(schedule: Any) -> bool:
        return bool(len(PLANES) * schedule.num_stages * schedule.num_microbatches <= MOST_ACTIONS)

    if not is_installed() and any(is_small(result.schedule) and not result.is_optimal for result in results):
        complain(
            "OR-tools is not installed, whose exact solver could find a shorter order or prove more of so few actions; "
            "pip install '.[search]' in Penstock's clone"
        )


def _write_schedule(schedule: Any, path: Path) -> None:
    from penstock.cli.conversion import convert
    from penstock.files import atomic_file

    text, _ = convert(schedule, SCHEDULE_SUFFIXES[path.suffix.lower()], file=str(path), is_lowered=False)
    with atomic_file(path.resolve()) as output:
        output.write(text.encode())


# ---- a search per limit


def _run_sweep(arguments: Namespace, costs: Any, limits: Sequence[Any], output: Output) -> ExitStatus:
    """Search within each memory limit of a sweep, write all results at once, and return the exit status.

    `limits` are `Limit`s and `costs` are the parsed costs. The status is INTERRUPTED where Ctrl-C left limits
    unsearched, and WRONG_INPUT where nothing fits within any limit.
    """
    from penstock.cli.searched import combined, refusals, rows_to_json, rows_to_picture, rows_to_table

    for limit in limits:
        limit.require_sizes(costs.activation_bytes, "--sweep")
    rows = combined(_search_within_limits(arguments, costs, limits))
    has_any = any(row.result for row in rows)
    if output.format == "json" and rows:
        output.write(rows_to_json(rows))
    if output.format == TABLE and has_any:
        output.write(rows_to_table(rows, output.screen))
    if output.format in CHARTS and has_any:
        shape = {"rank": arguments.ranks, "microbatch": arguments.microbatches}
        options = {"costs_text": _costs_text(arguments), "format": output.format, "theme": arguments.theme}
        output.write(rows_to_picture(rows, shape, **options))
        for line in refusals(rows):
            complain(f"not in the picture: {line.strip()}")
    if rows and not has_any:
        complain("\n".join(["nothing fits within any of these limits", *refusals(rows)]))
    _say_if_solver_is_missing([row.result for row in rows if row.result])
    unfinished_text = _unfinished(rows, limits)
    if unfinished_text:
        complain(unfinished_text)
        return ExitStatus.INTERRUPTED
    return ExitStatus.FINE if has_any else ExitStatus.WRONG_INPUT


def _search_within_limits(arguments: Namespace, costs: Any, limits: Sequence[Any]) -> list[Any]:
    """Return the results of a search per limit; where Ctrl-C ends a search, later limits have none."""
    from penstock.cli.searched import LimitResult

    rows: list[Any] = []
    for place, limit in enumerate(limits, start=1):
        try:
            result = _search(arguments, costs, limit, f"limit {limit} ({place} of {len(limits)}): ")
        except ScheduleError as error:
            rows.append(LimitResult(limit, reason=str(error)))
            continue
        except KeyboardInterrupt:
            break
        rows.append(LimitResult(limit, result))
        if result.was_interrupted:
            break
    return rows


def _unfinished(rows: Sequence[Any], limits: Sequence[Any]) -> str:
    """Return a line on the limits that Ctrl-C has cut short; empty where all are searched."""
    if not rows:
        return NOTHING_YET
    parts = [f"the row of {row.limit} is the best so far" for row in rows if row.result and row.result.was_interrupted]
    missing = [str(limit) for limit in limits[len(rows) :]]
    parts += [f"not searched: {', '.join(missing)}"] if missing else []
    return "; ".join(["interrupted", *parts]) if parts else ""


class _ProgressLines:
    """Prints how far a search is, if standard error is a terminal."""

    def __init__(self, about: str = "") -> None:
        self._is_shown = sys.stderr.isatty()
        self._about = about
        self._next_s = SECONDS_BETWEEN_LINES

    def __call__(self, progress: Any) -> None:
        if self._is_shown and progress.seconds >= self._next_s:
            self._next_s += SECONDS_BETWEEN_LINES
            complain(
                f"{self._about}{progress.seconds:.0f} s: best {progress.best_s:.6g} s, "
                f"bound {progress.bound_s:.6g} s, gap {progress.gap:.2%}"
            )
