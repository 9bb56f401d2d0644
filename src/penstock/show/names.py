"""Places names beside points: no name covers a point, another name or a line.

Each name tries the places around its point, near ones first, and takes the first that is free:

    6 2 7
    1 o 0      then the same further away, with a line that leads back to the point
    5 3 4
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

POINT_RADIUS, NAMED_RADIUS, GAP = 3.5, 8.0, 2.0
"""The radius of a point for lines, that for names of other points, and the gap between two names, in 1/72 inch."""
DISTANCES = (7.0, 14.0, 24.0, 38.0, 56.0, 80.0)
"""Distances from a point to its name, in 1/72 inch; a line leads to the name from the second distance on."""
EIGHT = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, -1), (-1, 1), (1, 1))
BETWEEN = ((1, 0.5), (-1, 0.5), (1, -0.5), (-1, -0.5), (0.5, 1), (-0.5, 1), (0.5, -1), (-0.5, -1))
OFFSETS = np.array([np.multiply(distance, way) for distance, way in product(DISTANCES, EIGHT + BETWEEN)])
NUM_SPOTS = 20
"""The number of spots of a line to a name at which the line is tested."""


@dataclass(frozen=True, slots=True)
class NamePosition:
    """The offset from a point to the nearest corner of its name, or to the middle of its nearest edge."""

    right: float
    up: float

    @property
    def has_line(self) -> bool:
        return max(abs(self.right), abs(self.up)) > DISTANCES[0]


def place_names(centres: Floats, sizes: Floats, lines: Floats, room: Floats) -> list[NamePosition | None]:
    """Place names of these sizes beside points, the first ones first; None for a name that finds no room.

    `centres` and `sizes` are [num_points, 2]. Boxes are [left, bottom, right, top]: names stay in the box `room`, and
    cover none of the boxes `lines`, [num_lines, 4], which lines to names may cross.
    """
    marks = np.hstack([centres - POINT_RADIUS, centres + POINT_RADIUS])
    around = np.hstack([centres - NAMED_RADIUS, centres + NAMED_RADIUS])
    names = np.empty((0, 4))
    places: list[NamePosition | None] = []
    for index, (centre, size) in enumerate(zip(centres, sizes, strict=True)):
        not_under_name = np.vstack([np.delete(around, index, axis=0), names, lines])
        not_under_line = np.vstack([np.delete(marks, index, axis=0), names])
        places.append(None)
        for offset in OFFSETS:
            box = _box(centre, size, offset)
            spots = _spots(centre, offset)
            is_inside = (room[:2] <= box[:2]).all() and (box[2:] <= room[2:]).all()
            if is_inside and not _any_covered(box[None], not_under_name) and not _any_covered(spots, not_under_line):
                places[-1] = NamePosition(*offset.tolist())
                names = np.vstack([names, box + GAP * np.array([-1, -1, 1, 1]), spots])
                break
    return places


def _box(centre: Floats, size: Floats, offset: Floats) -> Floats:
    corner = centre + offset - size * (1 - np.sign(offset)) / 2
    return np.concatenate([corner, corner + size])


def _spots(centre: Floats, offset: Floats) -> Floats:
    """Return boxes without size along the line to a name; none where it has no line."""
    has_line = NamePosition(*offset.tolist()).has_line
    return np.tile(np.linspace(centre, centre + offset, NUM_SPOTS if has_line else 0), 2)


def _any_covered(boxes: Floats, obstacles: Floats) -> bool:
    """Whether any of the boxes shares area with any of the obstacles."""
    is_over = (obstacles[:, :2] < boxes[:, None, 2:]) & (obstacles[:, 2:] > boxes[:, None, :2])
    return bool(is_over.all(axis=2).any())
