"""Actions as values, by their text."""

from penstock.errors import FormatError
from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.formats.cells import parse_cells


def parse_action(text):
    """Return the action or overlapped pair that a text names."""
    cells = parse_cells([[text]], lambda problem, *place: FormatError(problem))
    columns = (cells.stage.tolist(), cells.number.tolist(), cells.slice.tolist())
    actions = [Action(Kind(op), *numbers) for op, *numbers in zip(cells.op.tolist(), *columns, strict=True)]
    return OverlappedPair(*actions) if cells.joined.any() else actions[0]
