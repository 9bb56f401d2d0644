"""`penstock search`: the order that takes least time under given costs and memory, and how far it is from the best."""

from argparse import ArgumentParser, Namespace
from typing import Any

from penstock.cli.arguments import add_memory_limit, add_split, memory_limit_of
from penstock.cli.output import complain, path_to_write, say, stdout_screen
from penstock.cli.status import ExitStatus

SUMMARY = "Search for the order that takes least time under given costs and memory, and bound what is possible."
PLACEMENTS = ("line", "loop", "v", "wave", "any")
OBJECTIVES = ("makespan", "span")
SECONDS_BETWEEN_LINES = 2.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="P", required=True, help="number of ranks")
    parser.add_argument("--microbatches", type=int, metavar="M", required=True, help="number of microbatches")
    parser.add_argument(
        "--costs",
        default="F=1,I=1,W=1",
        metavar="COSTS",
        help="as for compare: seconds of all that a rank does for one microbatch, or a file: the same, per stage or "
        "per layer",
    )
    add_split(parser)
    parser.add_argument("--per-action", action="store_true", help="COSTS are those of one action of one stage")
    parser.add_argument("--placement", choices=PLACEMENTS, default="line", help="which ranks have which stages")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="default: 1 on a line, else 2")
    parser.add_argument("--objective", choices=OBJECTIVES, default="makespan", help="what is to be short")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long to search (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another one draws other moves (default 0)")
    add_memory_limit(parser)
    parser.add_argument("--schedule", metavar="PATH", help="write the schedule, as CSV or JSON, for all other commands")
    parser.add_argument("--force", action="store_true", help="replace PATH if it exists")
    parser.add_argument("--to", choices=("table", "json"), default="table", help="format of the result")


def run(arguments: Namespace) -> int:
    from penstock.cli.conversion import convert
    from penstock.files import atomic_file
    from penstock.ir.formats import FORMAT_OF_SUFFIX
    from penstock.searching.search import search

    path = None
    if arguments.schedule is not None:
        path = path_to_write(arguments.schedule, is_forced=arguments.force, key="--schedule")
    costs = _costs(arguments)
    found = search(
        costs,
        arguments.ranks,
        arguments.microbatches,
        memory_limit=memory_limit_of(arguments, costs.activation_bytes),
        placement=arguments.placement,
        stages_per_rank=arguments.stages_per_rank,
        objective=arguments.objective,
        seconds=arguments.seconds,
        seed=arguments.seed,
        progress=_Lines(),
    )
    if path is not None:
        text, _ = convert(
            found.schedule, FORMAT_OF_SUFFIX.get(path.suffix.lower(), "csv"), file=str(path), is_lowered=False
        )
        with atomic_file(path.resolve()) as output:
            output.write(text.encode())
    say(_as_json(found) if arguments.to == "json" else _as_table(found))
    if found.was_interrupted:
        complain("interrupted; this is the best so far")
        return ExitStatus.INTERRUPTED
    return ExitStatus.FINE


def _costs(arguments: Namespace) -> Any:
    """Return what each stage costs."""
    import numpy as np

    from penstock.cli.given_costs import given_costs
    from penstock.ir.schedule import Schedule
    from penstock.placement import Placement
    from penstock.planning import stage_costs
    from penstock.simulation import Costs
    from penstock.simulation.costs.equal_work import share_of_rank

    costs = given_costs(arguments, arguments.costs)
    per_rank = arguments.stages_per_rank or (1 if arguments.placement == "line" else 2)
    placement = Placement.loop(max(arguments.ranks, 1), max(arguments.ranks, 1) * max(per_rank, 1))
    none = [np.zeros((0, 3), np.int64)] * placement.num_ranks
    shape = Schedule.from_arrays("searched", placement, none, num_microbatches=max(arguments.microbatches, 1))
    if isinstance(costs, Costs) and not arguments.per_action:
        return share_of_rank(costs, shape)
    return stage_costs(costs, shape)


class _Lines:
    """Prints how far a search is, where somebody looks on."""

    def __init__(self) -> None:
        import sys

        self._is_shown = sys.stderr.isatty()
        self._next_s = SECONDS_BETWEEN_LINES

    def __call__(self, progress: Any) -> None:
        if self._is_shown and progress.seconds >= self._next_s:
            self._next_s += SECONDS_BETWEEN_LINES
            complain(
                f"{progress.seconds:.0f} s: best {progress.best_s:.6g} s, bound {progress.bound_s:.6g} s, "
                f"gap {progress.gap:.2%}"
            )


def _figures(found: Any) -> dict[str, Any]:
    return {
        "makespan_s": found.makespan_s,
        "span_s": found.span_s,
        "bubble_fraction": found.timeline.bubble_fraction,
        "bubble_rate": found.timeline.bubble_rate,
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "bound": {"name": found.bound.name, "rank": found.bound.rank, "terms": found.bound.terms},
        "peak_bytes": found.peak_bytes,
        "method": found.method,
        "seconds": found.seconds,
    }


def _as_json(found: Any) -> str:
    import json

    return json.dumps(_figures(found), indent=2)


def _as_table(found: Any) -> str:
    from penstock.ir.units import format_bytes

    peaks = found.peak_bytes if any(found.peak_bytes) else []
    rows = {
        "schedule": f"{found.schedule.name}, {found.schedule.placement.style} on {found.schedule.num_ranks} ranks",
        "makespan": f"{found.makespan_s:.6g} s",
        "span": f"{found.span_s:.6g} s",
        "bubble": f"{found.timeline.bubble_fraction:.2%}",
        "lower bound": f"{found.lower_bound_s:.6g} s: {found.bound}",
        "gap": "0: no order is shorter" if found.is_optimal else f"{found.gap:.2%}",
        **({"peak memory": " ".join(map(format_bytes, peaks))} if peaks else {}),
        "peak activations": " ".join(map(str, found.timeline.peak_activations)),
        "searched": f"{found.evaluations:,} sequences",
    }
    width = max(map(len, rows))
    return stdout_screen().wrapped("\n".join(f"{name:{width}}  {value}" for name, value in rows.items()))
