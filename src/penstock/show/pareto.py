"""Which schedules are worth a choice: step time against memory, as points, with the front of those that none beats.

time |  o pale: another one is faster and smaller        laid out here once, as pure data, in units of CSS pixels;
     |  *----.    o                                      `pareto_chart` draws it as SVG and PNG, `pareto_page` as HTML
     |       *----------.
     +------------------*-- memory
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, log10

from penstock.errors import ConfigError
from penstock.show.labels import Box, Name, Placed, place_names
from penstock.show.text import byte_unit, time_unit

WIDTH, HEIGHT = 960.0, 600.0
PLOT = Box(86.0, 92.0, WIDTH - 30.0, HEIGHT - 62.0)
FONT_SIZE, LETTER_WIDTH = 11.5, 0.6
LINE_HEIGHT = 1.25 * FONT_SIZE
MAX_LINES = 5
RADIUS = 4.5
LOGARITHMIC_ABOVE = 20.0
"""Where the largest value is so many times the smallest, distances show factors."""
HOW_TO_READ = "the line is the front: of what lies above and to the right of it, another schedule is better"
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule, of one shape, under the costs that all have in common."""

    label: str
    step_s: float
    memory: float
    """Of the rank that needs most, in the unit of the picture."""
    fits: bool = True
    """Whether it keeps a limit that was given; what does not is beaten by anything."""


@dataclass(frozen=True, slots=True)
class Caption:
    """What the picture is called, and what its numbers are."""

    title: str
    memory_name: str = "activations"
    is_bytes: bool = False
    """Whether memory is in bytes; else in numbers of what `memory_name` says."""
    warning: str = ""
    """What the candidates do not have in common."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of the picture: one candidate, or several that are equal."""

    candidates: tuple[Candidate, ...]
    x: float
    y: float
    is_on_front: bool
    label: Placed | None = None
    """None where there is no room for a name."""

    @property
    def lines(self) -> list[str]:
        """What is written beside it."""
        labels = [one.label if one.fits else f"{one.label} (over the limit)" for one in self.candidates]
        more = len(labels) - MAX_LINES
        return labels if more <= 0 else [*labels[: MAX_LINES - 1], f"and {more + 1} more"]

    @property
    def name(self) -> Name:
        """The room that its lines need."""
        letters = max(map(len, self.lines))
        return Name(self.x, self.y, LETTER_WIDTH * FONT_SIZE * letters, LINE_HEIGHT * len(self.lines))


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis, and what is written there."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Pareto:
    """The whole picture but its title."""

    marks: tuple[Mark, ...]
    front: tuple[Pair, ...]
    """The corners of a staircase: above and to the right of it everything is beaten."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_name: str
    y_name: str

    @property
    def num_nameless(self) -> int:
        """How many candidates have no room for a name."""
        return sum(len(mark.candidates) for mark in self.marks if mark.label is None)

    def notes(self, caption: Caption) -> list[str]:
        """Say how to read the picture, in lines."""
        left_out = f"; {self.num_nameless} names left out" if self.num_nameless else ""
        return [HOW_TO_READ + left_out, *([caption.warning] if caption.warning else [])]


def is_on_front(candidates: Sequence[Candidate]) -> list[bool]:
    """Return which candidates fit and none beats: none that fits is as good in both figures and better in one."""
    fitting = [index for index, candidate in enumerate(candidates) if candidate.fits]
    order = sorted(fitting, key=lambda index: (candidates[index].memory, candidates[index].step_s))
    result = [False] * len(candidates)
    best: Candidate | None = None
    for index in order:
        candidate = candidates[index]
        is_twin = best is not None and (candidate.memory, candidate.step_s) == (best.memory, best.step_s)
        result[index] = is_twin or best is None or candidate.step_s < best.step_s
        if result[index]:
            best = candidate
    return result


def lay_out(candidates: Sequence[Candidate], caption: Caption) -> Pareto:
    """Lay out the picture.

    Raises:
        ConfigError: if there is nothing to compare.
    """
    if not candidates:
        raise ConfigError("no schedule can be compared; a picture of step time and memory needs at least one")
    time_unit_s, time_name = time_unit(max(candidate.step_s for candidate in candidates))
    unit, unit_name = byte_unit(int(max(candidate.memory for candidate in candidates))) if caption.is_bytes else (1, "")
    x_scale = _Scale.of([candidate.memory / unit for candidate in candidates], PLOT.left, PLOT.right)
    y_scale = _Scale.of([candidate.step_s / time_unit_s for candidate in candidates], PLOT.bottom, PLOT.top)
    found: dict[Pair, list[int]] = {}
    for index, one in enumerate(candidates):
        found.setdefault((x_scale.at(one.memory / unit), y_scale.at(one.step_s / time_unit_s)), []).append(index)
    best = is_on_front(candidates)
    marks = [
        Mark(tuple(candidates[index] for index in indices), *place, any(best[index] for index in indices))
        for place, indices in found.items()
    ]
    front = _staircase(sorted((mark.x, mark.y) for mark in marks if mark.is_on_front))
    return Pareto(
        tuple(_with_labels(marks, front)),
        tuple(front),
        x_scale.ticks(),
        y_scale.ticks(),
        f"{caption.memory_name} ({unit_name})" if unit_name else caption.memory_name,
        f"step time ({time_name})",
    )


def _staircase(corners: list[Pair]) -> list[Pair]:
    path: list[Pair] = []
    for x, y in corners:
        if path:
            path.append((x, path[-1][1]))
        path.append((x, y))
    return path


def _with_labels(marks: Sequence[Mark], front: Sequence[Pair]) -> list[Mark]:
    """Names of the front first, then the others from the fastest on."""
    order = sorted(marks, key=lambda mark: (not mark.is_on_front, mark.candidates[0].step_s, mark.x))
    taken = [Box(mark.x, mark.y, mark.x, mark.y).grown(RADIUS + 1) for mark in marks]
    taken += [
        Box(min(ax, bx), min(ay, by), max(ax, bx), max(ay, by)).grown(1) for (ax, ay), (bx, by) in pairwise(front)
    ]
    labels = place_names([mark.name for mark in order], taken, PLOT)
    return [replace(mark, label=label) for mark, label in zip(order, labels, strict=True)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places on the picture."""

    low: float
    high: float
    begin: float
    end: float
    is_logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> "_Scale":
        low, high = min(values), max(values)
        if low > 0 and high / low > LOGARITHMIC_ABOVE:
            return cls(low / 1.3, high * 1.3, begin, end, is_logarithmic=True)
        margin = 0.08 * (high - low) if high > low else max(0.1 * high, 0.5)
        return cls(max(low - margin, 0.0), high + margin, begin, end, is_logarithmic=False)

    def at(self, value: float) -> float:
        share = (self._place(value) - self._place(self.low)) / (self._place(self.high) - self._place(self.low))
        return round(self.begin + share * (self.end - self.begin), 2)

    def _place(self, value: float) -> float:
        return log10(value) if self.is_logarithmic else value

    def ticks(self) -> tuple[Tick, ...]:
        values = self._powers() if self.is_logarithmic else self._steps()
        return tuple(Tick(self.at(value), f"{value:.6g}") for value in values)

    def _steps(self) -> list[float]:
        step = _nice((self.high - self.low) / 6)
        return [number * step for number in range(ceil(self.low / step), floor(self.high / step + 1e-9) + 1)]

    def _powers(self) -> list[float]:
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        return [value for value in values if self.low <= value <= self.high]


def _nice(rough: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten."""
    size = 10.0 ** floor(log10(rough))
    return next((factor * size for factor in (1, 2, 5) if factor * size >= rough * (1 - 1e-9)), 10 * size)
