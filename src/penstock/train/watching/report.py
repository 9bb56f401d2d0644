"""What a run leaves behind to look at: its timeline, measured and predicted, a summary, and where to find all that."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import orjson

from penstock.checkpoints.weight_files import INDEX, WHOLE
from penstock.errors import ConfigError, count_of
from penstock.files import naming_storage
from penstock.ir.timeline import Timeline
from penstock.show.chart import draw_overlay
from penstock.show.figures import describe_shape
from penstock.show.page import to_page
from penstock.show.text import format_bytes, format_seconds, format_share
from penstock.show.trace import to_trace
from penstock.simulation import simulate
from penstock.simulation.costs.fit import costs_from_timeline
from penstock.tables import NO_SCREEN, Column, Screen, table_text
from penstock.train.folder.run_folder import (
    CONFIG,
    LAYER_TIMES,
    LOG,
    MEMORY,
    METRICS,
    PAGE,
    PICTURE,
    PROFILE,
    SCHEDULE,
    SUMMARY,
    TENSORBOARD,
    TIMELINE,
    TRACE,
    RunFolder,
)
from penstock.train.watching.progress import duration_text

Timelines = Mapping[str, Timeline]
"""By name: "predicted" and "measured"; empty where no step was recorded."""

MEANING = {
    CONFIG: "every setting of the run, with its meaning",
    WHOLE: "the trained weights, with the names of the unsplit model",
    INDEX: "which of the files weights-* holds which of the trained weights",
    SCHEDULE: "the schedule that ran, one row per rank",
    LAYER_TIMES: "what each layer took when it was measured: the split uses it",
    SUMMARY: "the last losses, and the timelines in figures",
    METRICS: "one line of numbers per step",
    TIMELINE: "the recorded step as it was measured: penstock doctor says where its time went",
    PICTURE: "the recorded step, rank by rank: predicted above measured",
    PAGE: "the same, measured above predicted, to zoom and point at: open it in a browser",
    TRACE: "the same with every message: open it at https://ui.perfetto.dev",
    PROFILE: "the profiled steps of each rank: open it at https://ui.perfetto.dev",
    MEMORY: "what the GPU of each rank held at the end of these steps",
    LOG: "what rank 0 logged (debug.log); each rank has such a file",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    num_steps: int
    duration_s: float
    """Of the whole run, reading the text and evaluation included."""
    loss: float
    """Of the last step."""
    held_out_loss: float | None
    recorded_step: int
    peak_bytes: Sequence[int] = ()
    """The most memory of each rank; empty where it was not gathered."""
    num_earlier: int = 0
    """Of the steps, those that ran before the run was continued; the duration is without them."""

    @property
    def steps_text(self) -> str:
        """Say how many steps took the duration: `80 steps`, or `60 of 80 steps` of a run that was continued."""
        of_all = count_of(self.num_steps, "step")
        return f"{self.num_steps - self.num_earlier} of {of_all}" if self.num_earlier else of_all


def predict_again(measured: Timeline | None) -> Timelines:
    """Return the measured timeline, and what the simulator makes of its costs."""
    if measured is None:
        return {}
    return {"predicted": simulate(measured.program, costs_from_timeline(measured)), "measured": measured}


def write_report(
    folder: RunFolder, outcome: Outcome, timelines: Timelines, screen: Screen = NO_SCREEN
) -> Iterator[str]:
    """Write summary, trace, picture and page; yield lines on what came out, what each rank took, and where it is.

    Without matplotlib there is no picture, and a line says so.

    Raises:
        PenstockError: a file cannot be written.
    """
    folder.write(SUMMARY, orjson.dumps(_summary(outcome, timelines), option=orjson.OPT_INDENT_2))
    yield from _findings(outcome, timelines)
    yield from _table_of_ranks(outcome, timelines, screen)
    if timelines:
        folder.write(TRACE, to_trace(timelines))
        yield from _draw(folder, timelines)
        yield from _write_page(folder, timelines, outcome.recorded_step)
    yield f"\nIn {folder.path}:"
    yield from _listing(folder)


def _draw(folder: RunFolder, timelines: Timelines) -> Iterator[str]:
    path = folder.path / PICTURE
    try:
        with naming_storage(path):
            draw_overlay(timelines["measured"], timelines["predicted"], path)
    except ConfigError as error:
        yield f"{PICTURE} was not made: {error}"
    except BaseException:
        path.unlink(missing_ok=True)  # half a picture shows nothing
        raise


def page_of_step(timelines: Timelines, step: int, *, theme: str | None = None) -> bytes:
    """Return a page that shows a recorded step, rank by rank measured above predicted.

    Raises:
        ConfigError: an unknown theme, or more computations than a page holds.
    """
    title = f"{describe_shape(timelines['measured'].program)}, step {step}: measured above predicted"
    shown = {name: timelines[name] for name in ("measured", "predicted")}
    return to_page(shown, main="measured", title=title, theme=theme)


def _write_page(folder: RunFolder, timelines: Timelines, step: int) -> Iterator[str]:
    try:
        folder.write(PAGE, page_of_step(timelines, step))
    except ConfigError as error:
        yield f"{PAGE} was not made: {error}"


def _findings(outcome: Outcome, timelines: Timelines) -> Iterator[str]:
    held_out = "" if outcome.held_out_loss is None else f"held-out loss {outcome.held_out_loss:.4f} nats per token, "
    yield f"\n{held_out}loss {outcome.loss:.4f}, {outcome.steps_text} in {duration_text(outcome.duration_s)}"
    for name, timeline in timelines.items():
        yield (
            f"{name + ':':<10} makespan {format_seconds(timeline.makespan_s)}, "
            f"bubble {format_share(timeline.bubble_fraction)} (step {outcome.recorded_step})"
            f"{_uncertainty_text(timeline)}"
        )


def _table_of_ranks(outcome: Outcome, timelines: Timelines, screen: Screen) -> Iterator[str]:
    """Yield a row per rank; nothing where nothing was measured of them."""
    cells: dict[str, list[str]] = {}
    if timelines:
        cells["computing"] = [format_seconds(float(each)) for each in timelines["measured"].work_s]
        cells["bubble"] = _bubbles(timelines["measured"])
        cells["predicted"] = _bubbles(timelines["predicted"])
    if outcome.peak_bytes:
        cells["most memory"] = [format_bytes(each) for each in outcome.peak_bytes]
    if cells:
        # A run that has continued may have recorded its step on another number of ranks.
        rows = [[str(rank), *row] for rank, row in enumerate(zip_longest(*cells.values(), fillvalue=""))]
        columns = [Column(heading, drop_order=place) for place, heading in enumerate(("rank", *cells))]
        yield f"\n{table_text(columns, rows, screen)}"


def _bubbles(timeline: Timeline) -> list[str]:
    return [format_share(1 - float(each) / timeline.makespan_s) for each in timeline.work_s]


def _uncertainty_text(timeline: Timeline) -> str:
    uncertainty_s = timeline.clock_uncertainty_s
    return f"; times of different hosts within {format_seconds(uncertainty_s)} of each other" if uncertainty_s else ""


def _listing(folder: RunFolder) -> Iterator[str]:
    present = {name: meaning for name, meaning in MEANING.items() if any(folder.path.glob(name))}
    width = max(map(len, present))
    for name, meaning in present.items():
        yield f"  {name:<{width}}  {meaning}"
    if (folder.path / TENSORBOARD).exists():
        yield f"  {TENSORBOARD:<{width}}  curves: tensorboard --logdir {folder.path / TENSORBOARD}"


def _summary(outcome: Outcome, timelines: Timelines) -> dict[str, object]:
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
        "num_steps": outcome.num_steps,
        "duration_s": outcome.duration_s,
        "loss": outcome.loss,
        "held_out_loss": outcome.held_out_loss,
        "recorded_step": outcome.recorded_step if timelines else None,
        "timelines": figures,
    }
