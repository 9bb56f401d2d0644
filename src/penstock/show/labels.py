"""Places names beside points so that none covers another name or a point.

Each name tries the places around its point, near ones first, and takes the first that is free:

    6 2 7
    1 o 0      then the same further away; a line leads back where another point is near
    5 3 4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf
from typing import Literal

DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, 1), (-1, 1), (-1, -1), (1, -1))
DISTANCES = (8.0, 14.0, 24.0, 38.0, 56.0, 80.0)
"""From the point to the name, in the unit of the places."""
MARGIN = 2.0
Side = Literal["left", "center", "right"]
NEARER = 1.5
"""A name needs a line where another point is less than so many times as far away as its own."""
ATTACHED = 18.0
"""A name so near to a point looks as if it were that point's, whatever line leads elsewhere."""
ENOUGH = 24.0
"""So far away a place without a line is better than a nearer one with a line."""
LINE_STEP = 4.0
"""Between the places at which a line is tested."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; y counts downward."""

    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: "Box") -> bool:
        """Whether the two share any area."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def contains(self, other: "Box") -> bool:
        """Whether all of the other one lies inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def grown(self, margin: float) -> "Box":
        """Return the rectangle with a margin around it."""
        return Box(self.left - margin, self.top - margin, self.right + margin, self.bottom + margin)


@dataclass(frozen=True, slots=True)
class Name:
    """A text of some width and height that belongs to a point."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a name stands, at which side its lines begin, and whether a line leads from it to its point."""

    box: Box
    side: Side
    has_line: bool

    @property
    def anchor(self) -> float:
        """Where the lines begin, end or have their middle."""
        places = {"left": self.box.left, "right": self.box.right, "center": (self.box.left + self.box.right) / 2}
        return places[self.side]


def place_names(names: Sequence[Name], taken: Sequence[Box], inside: Box) -> list[Placed | None]:
    """Place names, the first ones first; None for a name that finds no room.

    `taken` is what names must not cover, points and lines for example; all names stay `inside`, and the line that leads
    back from one covers no other.
    """
    covered = list(taken)
    boxes: list[Box] = []
    placed: list[Placed | None] = []
    for name in names:
        others = [other for other in names if (other.x, other.y) != (name.x, name.y)]
        found = _first_free(name, others, [covered, boxes], inside)
        placed.append(found)
        if found is None:
            continue
        boxes.append(found.box.grown(MARGIN))
        covered += [boxes[-1], *(_line(name, found.box) if found.has_line else [])]
    return placed


def line_end(name: Name, box: Box) -> tuple[float, float]:
    """Return where a line from the point meets the name: its nearest place."""
    return min(max(name.x, box.left), box.right), min(max(name.y, box.top), box.bottom)


def _first_free(name: Name, others: Sequence[Name], taken: list[list[Box]], inside: Box) -> Placed | None:
    """`taken`: what names must not cover, and what lines must not cover. Near places without a line come first."""
    with_line = None
    for distance in DISTANCES:
        for across, down in DIRECTIONS:
            box = _box_at(name, across * distance, down * distance)
            if not inside.contains(box) or any(box.covers(other) for other in taken[0]):
                continue
            side: Side = "left" if across > 0 else "right" if across < 0 else "center"
            nearest = min((_distance(other, box) for other in others), default=inf)
            if nearest >= NEARER * _distance(name, box):
                return Placed(box, side, has_line=False)
            if nearest > ATTACHED and not any(step.covers(other) for step in _line(name, box) for other in taken[1]):
                with_line = with_line or Placed(box, side, has_line=True)
        if with_line is not None and distance >= ENOUGH:
            break
    return with_line


def _distance(name: Name, box: Box) -> float:
    """From the point of a name to a rectangle."""
    x, y = line_end(name, box)
    return hypot(x - name.x, y - name.y)


def _line(name: Name, box: Box) -> list[Box]:
    """Small boxes along the line from the point to the name."""
    x, y = line_end(name, box)
    steps = max(int(max(abs(x - name.x), abs(y - name.y)) / LINE_STEP), 1)
    places = [(name.x + (x - name.x) * step / steps, name.y + (y - name.y) * step / steps) for step in range(steps + 1)]
    return [Box(across, down, across, down).grown(1.0) for across, down in places]


def _box_at(name: Name, across: float, down: float) -> Box:
    """The name beside its point: its nearest edge, or its middle where it stands straight above, is so far away."""
    x, y = name.x + across, name.y + down
    left = x if across > 0 else x - name.width if across < 0 else x - name.width / 2
    top = y if down > 0 else y - name.height if down < 0 else y - name.height / 2
    return Box(left, top, left + name.width, top + name.height)
