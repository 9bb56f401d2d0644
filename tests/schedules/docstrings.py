"""What the files of families draw in their docstrings: an order of the size that its heading names, or a V's block."""

import re
import sys

from penstock.schedules import build
from tests.support.grids import assert_grid

SIZES = (r"(?P<ranks>\d+) ranks", r"(?P<stages_per_rank>\d+) stages each", r"(?P<microbatches>\d+) microbatches")
OPTIONS = (r"(?P<slices>\d+) slices", r"breadth (?P<breadth>\d+)", r"depth (?P<depth>\d+)")
MODULES = {
    module.FAMILY.name: module
    for name, module in sys.modules.items()
    if name.startswith("penstock.schedules.") and hasattr(module, "FAMILY")
}


def drawn(name, words):
    """Return the numbers in the line of a family's docstring that has these words, and the drawing below it."""
    heading, drawing = re.search(rf"^(.*{words}.*)\n\n((?:.+\n)+)", MODULES[name].__doc__, re.MULTILINE).groups()
    found = [re.search(size, heading) for size in (*SIZES, *OPTIONS)]
    return {key: int(number) for each in found if each for key, number in each.groupdict().items()}, drawing


def assert_drawn(name):
    """Compare the order of a family with the one that its docstring draws."""
    sizes, drawing = drawn(name, "the order of each rank")

    assert_grid(build(name, **sizes), drawing)
