"""A timeline as a picture in any format: what `penstock show` draws, and `ps.draw` writes to a file."""

from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError, described
from penstock.files import atomic_file
from penstock.ir.timeline import Timeline
from penstock.show import CHARTS, SUFFIXES
from penstock.show.chart import overlay_chart, timeline_chart
from penstock.show.figures import describe_shape
from penstock.show.page import to_page
from penstock.show.trace import to_trace
from penstock.simulation import Costs, simulate
from penstock.simulation.costs.fit import costs_from_timeline

Timelines = Mapping[str, Timeline]
"""The timelines of a step by name, "predicted" and "measured"; empty where no step was recorded."""


def draw(timeline: Timeline, path: str | Path, *, theme: str | None = None, costs: Costs | None = None) -> None:
    """Draw a timeline as `penstock show` does, into a file of the format that its suffix says.

    `.svg` and `.png` are charts, `.html` is a page to zoom and point at, and `.trace` is for Perfetto. A measured
    timeline is drawn with its prediction, rank by rank. `theme` is light (the default; a page follows the browser) or
    dark. `costs` are those that a timeline was predicted with, by which a page explains idle time. A file of this name
    is replaced.

    Raises:
        ConfigError: another suffix, an unknown theme or one of a trace, a timeline too large for a page or trace, or a
            chart where matplotlib is not installed.
        PenstockError: the file cannot be written.
    """
    if not isinstance(timeline, Timeline):
        problem = f"{described(timeline)}; expected a Timeline, such as penstock.simulate returns"
        raise ConfigError(problem, key="timeline")
    target = Path(path)
    format = SUFFIXES.get(target.suffix.lower())
    if format is None:
        problem = f"{target} has none of the suffixes {', '.join(SUFFIXES)}; end it in one of them"
        raise ConfigError(f"{problem} (Timeline.save writes .json)", key="path")
    if theme is not None and format not in CHARTS:
        raise ConfigError(f"only for {', '.join(CHARTS)}; leave it out for {format}", key="theme")
    picture = picture_of(timeline, format, theme=theme, costs=costs)
    with atomic_file(target) as file:
        file.write(picture)


def picture_of(
    timeline: Timeline,
    format: str,
    *,
    theme: str | None = None,
    costs: Costs | None = None,
    title: str | None = None,
    more: Mapping[str, str] | None = None,
) -> bytes:
    """Draw a timeline as `svg`, `png`, `html` or `trace`; a measured one is drawn with its prediction.

    `costs` are those that the timeline was predicted with. `title` and `more` (figures by name, written beside the
    timeline's own) are not used for a measured one.

    Raises:
        ConfigError: as `draw`.
    """
    if timeline.source == "measured":
        return _picture_of_step(timeline, format, theme)
    name: str = timeline.source
    if format == "trace":
        return to_trace({name: timeline})
    if format == "html":
        costs_by_name = {} if costs is None else {name: costs}
        return to_page({name: timeline}, costs=costs_by_name, title=title, theme=theme, more=more)
    return timeline_chart(timeline, format=format, title=title, theme=theme or "light", more=more)


def _picture_of_step(measured: Timeline, format: str, theme: str | None) -> bytes:
    """Draw a measured step with the prediction from its own costs."""
    timelines = predict_again(measured)
    if format == "trace":
        return to_trace(timelines)
    if format == "html":
        return page_of_step(timelines, theme=theme)
    return overlay_chart(measured, timelines["predicted"], format=format, theme=theme or "light")


def predict_again(measured: Timeline | None) -> Timelines:
    """Return the measured timeline, and the timeline that the simulator predicts from its costs."""
    if measured is None:
        return {}
    return {"predicted": simulate(measured.program, costs_from_timeline(measured)), "measured": measured}


def page_of_step(timelines: Timelines, *, theme: str | None = None) -> bytes:
    """Return a page that shows a recorded step, rank by rank measured above predicted.

    Raises:
        ConfigError: an unknown theme, or more computations than a page holds.
    """
    measured = timelines["measured"]
    step = f", step {measured.step}" if measured.step else ""
    title = f"{describe_shape(measured.program)}{step}: measured above predicted"
    shown = {name: timelines[name] for name in ("measured", "predicted")}
    return to_page(shown, main="measured", title=title, theme=theme)
