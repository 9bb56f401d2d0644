"""The first and the last lines of a run, and the files that it leaves to look at.

First: where it computes, what is trained on how much text, and how the model is split. Last: its losses, its timeline
measured and predicted, and where to find all that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import orjson

from penstock.errors import ConfigError, count_of
from penstock.execute.accelerator import is_queued, name_of, queued_backend
from penstock.ir.timeline import Timeline
from penstock.models import LayerSpec, count_parameters
from penstock.pipeline import Pipeline
from penstock.planning import few_microbatches
from penstock.show.chart import overlay_chart
from penstock.show.picture import Timelines, page_of_step, predict_again
from penstock.show.text import format_bytes, format_seconds, format_share
from penstock.show.trace import to_trace
from penstock.tables import NO_SCREEN, Column, Screen, table_text
from penstock.train.devices import device_of_rank
from penstock.train.folder.run_folder import MEANING, PAGE, PICTURE, SUMMARY, TENSORBOARD, TRACE, RunFolder
from penstock.train.optimizing.precision import Precision, note_on_speed
from penstock.train.settings.config import RunConfig
from penstock.train.settings.optional_packages import describe_missing_pictures
from penstock.train.watching.progress import duration_text


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The end of a run, on every rank alike."""

    num_steps: int
    """Optimizer steps of the whole run."""
    loss: float
    """Loss of the last step, in nats per token."""
    held_out_loss: float | None
    """Held-out loss after the last step, in nats per token; None where the run does not evaluate."""
    timeline: Timeline | None
    """The recorded step of this rank's replica; None where no step was recorded."""
    peak_bytes: Sequence[int] = ()
    """The most memory of each rank of the first replica; empty where it was not gathered."""
    num_earlier: int = 0
    """Steps that ran before this run was continued."""


def device_line(config: RunConfig) -> str:
    """Say where a run computes, and in which types. Raises: ConfigError; see `device_of_rank`."""
    device, num_ranks = device_of_rank(config), config.num_processes
    where, between = "CPU", "gloo"
    if is_queued(device):
        where, between = name_of(device), (queued_backend(device.type) or "no").upper()
    placement = f"1 rank on {where}" if num_ranks == 1 else f"{num_ranks} ranks on {where}, backend {between}"
    return f"{placement}; precision {Precision(config.precision).describe(config.model)}"


def opening_lines(
    config: RunConfig,
    layers: Sequence[LayerSpec],
    num_tokens: int | None,
    pipeline: Pipeline,
    note: str,
    screen: Screen,
) -> Iterator[str]:
    """Yield the first lines of a run, when its pipeline is made; `note` says where measured weights come from."""
    yield screen.wrapped(_first_line(config, count_parameters(layers), num_tokens))
    yield pipeline.describe_split(width=screen.width).removesuffix("\n")
    if note:
        yield screen.wrapped(note)
    slow_type = note_on_speed(Precision(config.precision), pipeline.device)
    for advice in filter(None, (few_microbatches(pipeline.program), slow_type)):
        yield screen.wrapped(f"note: {advice}")
    missing = describe_missing_pictures(config)
    if missing:
        yield screen.wrapped(missing)


def _first_line(config: RunConfig, num_parameters: int, num_tokens: int | None) -> str:
    pipeline, data = config.pipeline, config.parallel.data
    replicas = f"{data} replicas of " if data > 1 else ""
    ranks = f"{replicas}{count_of(pipeline.ranks, 'rank')}"
    tokens = f"data of {config.data.source}" if num_tokens is None else f"{num_tokens:,} tokens to train on"
    return (
        f"{num_parameters:,} parameters, {tokens}, "
        f"{pipeline.schedule} on {ranks}, "
        f"{pipeline.microbatches} microbatches, {config.run.steps} steps"
    )


def write_report(
    folder: RunFolder, result: TrainingResult, duration_s: float, screen: Screen = NO_SCREEN
) -> Iterator[str]:
    """Write summary, trace, picture and page; yield lines on what came out, what each rank took, and where it is.

    `duration_s` is of the whole run, reading the text and evaluation included. Without matplotlib there is no picture,
    and a line says so.

    Raises:
        PenstockError: a file cannot be written.
    """
    timelines = predict_again(result.timeline)
    folder.write(SUMMARY, orjson.dumps(_summary(result, duration_s, timelines), option=orjson.OPT_INDENT_2))
    yield from _findings(result, duration_s, timelines)
    yield from _table_of_ranks(result, timelines, screen)
    if result.timeline is not None:
        folder.write(TRACE, to_trace(timelines))
        measured, predicted = timelines["measured"], timelines["predicted"]
        yield from _draw(folder, PICTURE, partial(overlay_chart, measured, predicted, format="png"))
        yield from _draw(folder, PAGE, partial(page_of_step, timelines))
    yield f"\nIn {folder.path}:"
    yield from _listing(folder)


def _draw(folder: RunFolder, name: str, picture: Callable[[], bytes]) -> Iterator[str]:
    """Write a picture into the run folder; yield a line on why it could not be made, as without matplotlib."""
    try:
        folder.write(name, picture())
    except ConfigError as error:
        yield f"{name} was not made: {error}"


def _findings(result: TrainingResult, duration_s: float, timelines: Timelines) -> Iterator[str]:
    held_out = "" if result.held_out_loss is None else f"held-out loss {result.held_out_loss:.4f} nats per token, "
    of_all = count_of(result.num_steps, "step")
    steps = f"{result.num_steps - result.num_earlier} of {of_all}" if result.num_earlier else of_all  # continued
    yield f"\n{held_out}loss {result.loss:.4f}, {steps} in {duration_text(duration_s)}"
    step = result.timeline.step if result.timeline else 0
    for name, timeline in timelines.items():
        uncertainty_s = timeline.clock_uncertainty_s
        within = f"; times of different hosts within {format_seconds(uncertainty_s)} of each other"
        yield (
            f"{name + ':':<10} makespan {format_seconds(timeline.makespan_s)}, "
            f"bubble {format_share(timeline.bubble_fraction)} (step {step}){within if uncertainty_s else ''}"
        )


def _table_of_ranks(result: TrainingResult, timelines: Timelines, screen: Screen) -> Iterator[str]:
    """Yield a table of the ranks' seconds, bubbles and memory; nothing where none of these was measured."""
    cells: dict[str, list[str]] = {}
    if timelines:
        cells["computing"] = [format_seconds(float(work_s)) for work_s in timelines["measured"].work_s]
        cells["bubble"] = _bubbles(timelines["measured"])
        cells["predicted"] = _bubbles(timelines["predicted"])
    if result.peak_bytes:
        cells["most memory"] = [format_bytes(num_bytes) for num_bytes in result.peak_bytes]
    if cells:
        # A run that has continued may have recorded its step on another number of ranks.
        rows = [[str(rank), *row] for rank, row in enumerate(zip_longest(*cells.values(), fillvalue=""))]
        columns = [Column(heading, drop_order=place) for place, heading in enumerate(("rank", *cells))]
        yield f"\n{table_text(columns, rows, screen)}"


def _bubbles(timeline: Timeline) -> list[str]:
    return [format_share(1 - float(work_s) / timeline.makespan_s) for work_s in timeline.work_s]


def _listing(folder: RunFolder) -> Iterator[str]:
    present = {name: meaning for name, meaning in MEANING.items() if any(folder.path.glob(name))}
    width = max(map(len, present))
    for name, meaning in present.items():
        yield f"  {name:<{width}}  {meaning}"
    if (folder.path / TENSORBOARD).exists():
        yield f"  {TENSORBOARD:<{width}}  curves: tensorboard --logdir {folder.path / TENSORBOARD}"


def _summary(result: TrainingResult, duration_s: float, timelines: Timelines) -> dict[str, object]:
    figures = {
        name: {
            "makespan_s": timeline.makespan_s,
            "span_s": timeline.span_s,
            "bubble_fraction": timeline.bubble_fraction,
            "bubble_rate": timeline.bubble_rate,
            "seconds_by_operation": [
                {op.name.lower(): seconds for op, seconds in of_rank.items()} for of_rank in timeline.seconds_by_op()
            ],
        }
        for name, timeline in timelines.items()
    }
    return {
        "num_steps": result.num_steps,
        "duration_s": duration_s,
        "loss": result.loss,
        "held_out_loss": result.held_out_loss,
        "recorded_step": result.timeline.step if result.timeline else None,
        "timelines": figures,
    }
