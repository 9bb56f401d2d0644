"""`penstock doctor`: where the time of a recorded step went and what would take less; or what this machine has."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cli.arguments import COUNTED_LIMIT, add_format, add_memory_limit, counted_limit_of
from penstock.cli.output import say, stdout_screen
from penstock.cli.status import ExitStatus
from penstock.errors import ConfigError

SUMMARY = "Say where the time of a recorded step went, and what would help; or what this machine has."


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(wrong_usage=parser.error)
    parser.add_argument(
        "step",
        metavar="RUN_DIR",
        nargs="?",
        help="the folder of a run that recorded a step, or the .json file of a timeline that was saved",
    )
    parser.add_argument("--system", action="store_true", help="instead, look at this machine")
    parser.add_argument(
        "--split", metavar="LAYERS", help="say what this split would do: layers of each stage, such as 3,4"
    )
    add_memory_limit(parser, COUNTED_LIMIT)
    add_format(parser, ("text", "json"), "default: text")


def run_command(arguments: Namespace) -> int:
    """Run `penstock doctor`: say where the time of a recorded step went, or with --system examine the machine.

    RUN_DIR is the folder of a run, or a file with one recorded step.

    Raises:
        PenstockError: no step was recorded, or its files do not fit the arguments.
    """
    if arguments.system == (arguments.step is not None):
        arguments.wrong_usage("give either RUN_DIR or --system")
    if arguments.system and any(
        option is not None for option in (arguments.format, arguments.memory_limit, arguments.split)
    ):
        arguments.wrong_usage("--to, --memory-limit and --split are for a RUN_DIR, not for --system")
    if arguments.system:
        return _examine_system()
    from penstock.cli.diagnosis import to_json, to_text
    from penstock.cli.given_costs import read_split
    from penstock.partition.split import split_over
    from penstock.searching.what_if import Setting
    from penstock.simulation.costs.file import read_costs
    from penstock.train.folder.run_folder import CONFIG, COSTS
    from penstock.train.settings.config import load_config
    from penstock.train.watching.diagnosis import diagnose, setting_of
    from penstock.train.watching.recorded_step import read_recorded_step

    path = Path(arguments.step)
    is_run = not path.is_file()
    limit = counted_limit_of(arguments)
    recorded = read_recorded_step(path) if is_run else _measured_step(path)
    # A file of one step comes without a run file and its batch size, and without a profile.
    setting = setting_of(load_config(path / CONFIG)) if is_run else Setting()
    profiled_costs = read_costs(path / COSTS) if is_run and (path / COSTS).exists() else None
    program = recorded.program
    if arguments.split is not None:
        setting = replace(setting, split=read_split(arguments.split))
        split_over(program.placement, len(recorded.layer_weights), split=setting.split)  # refuses one that does not fit
    activation_limits = limit and limit.of_ranks(program.num_ranks, program.parts_per_rank).tolist()
    diagnosis = diagnose(recorded, setting, profiled=profiled_costs, memory_limit=activation_limits)
    if not is_run:
        diagnosis = replace(diagnosis, changes=[replace(change, settings=()) for change in diagnosis.changes])
    else:
        diagnosis = replace(diagnosis, plan=_against_plan(path))
    screen = stdout_screen()
    say(to_json(diagnosis) if arguments.format == "json" else to_text(diagnosis, screen, asked_split=setting.split))
    return ExitStatus.FINE


def _against_plan(folder: Path) -> Any:
    """Return a run beside the plan that it was started with; None where there was none, or nothing was measured."""
    from penstock.train.folder.run_folder import CONFIG, METRICS
    from penstock.train.settings.config import load_config
    from penstock.train.watching.against_plan import AgainstPlan
    from penstock.train.watching.metrics import read_metrics

    config = load_config(folder / CONFIG)
    rows = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    return AgainstPlan.of(config.plan, rows, counts_memory=config.run.device != "cpu")


def _measured_step(path: Path) -> Any:
    """Read the file of a measured `Timeline`. Raises: ConfigError, FormatError."""
    from penstock.ir.timeline import Timeline

    timeline = Timeline.load(path)
    if timeline.source != "measured":
        raise ConfigError(
            f"{path} is a {timeline.source} timeline; give one that was measured, such as pipeline.timeline of a step "
            "with record=True"
        )
    return timeline


def _examine_system() -> int:
    from penstock.cli.probes import examine_system
    from penstock.tables import Column, table_text

    rows = [(finding.subject, finding.state, finding.fix) for finding in examine_system()]
    columns = [Column(heading, is_text=True) for heading in ("what", "found", "what to fix")]
    say(table_text(columns, rows, stdout_screen(), row_styles=["yellow" if fix else "" for _, _, fix in rows]))
    return ExitStatus.FINE
