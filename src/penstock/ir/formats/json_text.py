"""Schedules and programs as JSON: everything that the tables hold, so that reading back gives the same table.

    {"format": "penstock-schedule", "version": 1, "name": "1f1b",
     "placement": {"style": "line", "rank_of_stage": [0, 1], "routes": [[0, 1]]},
     "microbatches": 2, "slices": 1, "route_of_microbatch": [0, 0],
     "ranks": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}

A program is a "penstock-program" and has "tied_groups", "peers" and "slots" besides; the latter two are lists per rank
with one number per instruction, two for an overlapped pair. One that omits its reductions has "omits_reductions": true,
one with stages of a rank that share a parameter has "units": [[0, 3]], and one whose messages are launched in groups
has "groups", with a number per instruction, 0 for none.
"""

import json
from typing import Any, TypeVar

import numpy as np
import orjson

from penstock.errors import FormatError, ScheduleError, nearest
from penstock.ir.formats.cells import MAX_NUMBER, Cells, cells_of, parse_cells, require_text, too_sparse
from penstock.ir.hot import Int32s
from penstock.ir.operations import Op
from penstock.ir.table import Table
from penstock.placement import STYLES, Placement

SCHEDULE_FORMAT = "penstock-schedule"
PROGRAM_FORMAT = "penstock-program"
VERSION = 1

_SCHEDULE_KEYS = (
    "format", "version", "name", "placement", "microbatches", "slices", "route_of_microbatch", "ranks",
)  # fmt: skip
_PROGRAM_KEYS = (*_SCHEDULE_KEYS, "tied_groups", "peers", "slots")
_OMITS_KEY = "omits_reductions"
_UNITS_KEY = "units"
_GROUPS_KEY = "groups"
_OPTIONAL_KEYS = (_OMITS_KEY, _UNITS_KEY, _GROUPS_KEY)
"""Keys that only those programs have of which they say something."""
_PLACEMENT_KEYS = ("style", "rank_of_stage", "routes")

_LIST, _TEXT = "list; expected a list", "text; expected a string"

JsonType = TypeVar("JsonType")


def schedule_to_json(schedule: Table) -> str:
    """Write a schedule, one line per rank."""
    return _lay_out(_metadata(schedule, SCHEDULE_FORMAT) | {"ranks": cells_of(schedule)})


def program_to_json(program: Any) -> str:
    """Write a `Program`, whose file imports this one, one line per rank."""
    return _lay_out(
        _metadata(program, PROGRAM_FORMAT)
        | {
            "tied_groups": program.tied_groups,
            "ranks": cells_of(program),
            "peers": [program.peer[rows].tolist() for rows in program.ranks],
            "slots": [program.slot[rows].tolist() for rows in program.ranks],
        }
        | ({_GROUPS_KEY: [program.group[rows].tolist() for rows in program.ranks]} if program.has_groups else {})
        | ({_UNITS_KEY: program.units} if program.units else {})
        | ({_OMITS_KEY: True} if program.omits_reductions else {})
    )


def schedule_from_json(text: str, file: str) -> dict[str, Any]:
    """Read a schedule; return the fields of a `Schedule`.

    Raises:
        FormatError: with line and column for what is no JSON, else with the JSON path of what is wrong.
    """
    reader = JsonReader(file)
    document = reader.document(text, SCHEDULE_FORMAT, _SCHEDULE_KEYS)
    cells, fields = reader.table(document)
    problem = "a schedule has no communication; expected an action such as 0F0"
    columns = cells.actions(lambda text, rank, cell, _: reader.fail(f"ranks[{rank}][{cell}]", text), problem)
    return fields | columns


def program_from_json(text: str, file: str) -> dict[str, Any]:
    """Read a program, which is a schedule with its messages and collectives; return the fields of a `Program`.

    `file` is the name for messages. Beside the cells (one text per instruction), the document has each instruction's
    peer, which is a stage or a tied group, and its slot, which is the number of a buffer.

    Raises:
        FormatError: the text is no JSON, a key is missing or unknown, or a value does not fit.
    """
    reader = JsonReader(file)
    document = reader.document(text, PROGRAM_FORMAT, _PROGRAM_KEYS, optional=_OPTIONAL_KEYS)
    if document.get(_OMITS_KEY, True) is not True:
        raise reader.fail(_OMITS_KEY, f"{_shown(document[_OMITS_KEY])} does not fit; expected true, or no such key")
    cells, fields = reader.table(document)
    num_stages = fields["placement"].num_stages
    groups = reader.number_lists(document["tied_groups"], "tied_groups", num_stages - 1)
    units = reader.number_lists(document.get(_UNITS_KEY, []), _UNITS_KEY, num_stages - 1)
    # A tied reduction names a tied group as its peer, and any other instruction a stage.
    peer = reader.column(document["peers"], "peers", cells)
    is_tied = cells.op == Op.REDUCE_TIED
    num_peers = np.where(is_tied, len(groups), num_stages)
    wrong_rows = np.flatnonzero((peer >= num_peers) | (is_tied & (peer != cells.number)))
    if len(wrong_rows):
        row = int(wrong_rows[0])
        rank = cells.place(row)[0]
        expected_peer = f"the tied group that its text names, below {len(groups)}"
        expected_peer = expected_peer if is_tied[row] else f"below {num_stages}"
        raise reader.fail(
            f"peers[{rank}][{row - int(cells.offsets[rank])}]", f"{peer[row]} is no peer; expected {expected_peer}"
        )
    return {
        **fields,
        **cells.columns(),
        "tied_groups": tuple(map(tuple, groups)),
        "units": tuple(map(tuple, units)),
        "peer": peer,
        "slot": reader.column(document["slots"], "slots", cells),
        **({"group": reader.column(document[_GROUPS_KEY], _GROUPS_KEY, cells)} if _GROUPS_KEY in document else {}),
        "omits_reductions": _OMITS_KEY in document,
    }


def kind_of_json(text: str, *, file: str = "<text>") -> str:
    """Return what a text says that it holds: `SCHEDULE_FORMAT` or `PROGRAM_FORMAT`.

    Raises:
        FormatError: if it is no JSON object, or says neither.
    """
    reader = JsonReader(file)
    format_name = reader.object(text).get("format")
    if format_name not in (SCHEDULE_FORMAT, PROGRAM_FORMAT):
        raise reader.fail(
            "format", f"{_shown(format_name)} cannot be read; expected {SCHEDULE_FORMAT!r} or {PROGRAM_FORMAT!r}"
        )
    return str(format_name)


def _metadata(table: Table, format_name: str) -> dict[str, Any]:
    placement = table.placement
    return {
        "format": format_name,
        "version": VERSION,
        "name": table.name,
        "placement": {
            "style": placement.style,
            "rank_of_stage": placement.rank_of_stage,
            "routes": placement.routes,
        },
        "microbatches": table.num_microbatches,
        "slices": table.num_slices,
        "route_of_microbatch": table.route_of_microbatch.tolist(),
    }


def _lay_out(document: dict[str, Any]) -> str:
    """A line per key, and a line per rank where there is one entry per rank."""
    entries = []
    for key, value in document.items():
        if key in ("ranks", "peers", "slots", _GROUPS_KEY):
            rows = ",\n".join(f"    {_dump(row)}" for row in value)
            entries.append(f'  "{key}": [\n{rows}\n  ]')
        else:
            entries.append(f'  "{key}": {_dump(value)}')
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()


class JsonReader:
    """Checks the types of a document's parts and names the JSON path of the first that is wrong."""

    def __init__(self, file: str) -> None:
        self._file = file

    def fail(self, path: str, problem: str) -> FormatError:
        return FormatError(f"{path}: {problem}", file=self._file)

    def require(self, json_type: type[JsonType], value: Any, path: str, expected: str) -> JsonType:
        """Return a value that must be of a type; `expected` names that type and says what is expected."""
        if not isinstance(value, json_type):
            raise self.fail(path, f"{_shown(value)} is no {expected}")
        return value

    def object(self, text: str) -> dict[str, Any]:
        """Parse the text, which must be one object."""
        require_text(text)
        try:
            value = orjson.loads(text.removeprefix("\ufeff"))
        except orjson.JSONDecodeError as error:
            problem = f"this is no JSON: {error.msg}; expected one object"
            raise FormatError(problem, file=self._file, line=error.lineno, column=max(error.colno, 1)) from None
        document: dict[str, Any] = self.require(dict, value, "$", "object; expected one with the keys of a schedule")
        keys = (*_PROGRAM_KEYS, *_PLACEMENT_KEYS, *_OPTIONAL_KEYS)
        if "\\" in text or any(text.count(f'"{key}"') > 1 for key in keys):
            json.loads(text.removeprefix("\ufeff"), object_pairs_hook=self._refuse_repeated)  # orjson keeps the last
        return document

    def _refuse_repeated(self, pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise self.fail("$", f'the key "{key}" is there {keys.count(key)} times; expected it once')

    def document(
        self, text: str, format_name: str, keys: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Parse the text and check its top level."""
        document = self.object(text)
        for key, expected in (("format", format_name), ("version", VERSION)):
            if key not in document:
                raise self.fail("$", f'the key "{key}" is missing; expected {expected!r} there')
            if document[key] != expected or type(document[key]) is not type(expected):
                raise self.fail(key, f"{_shown(document[key])} cannot be read here; expected {expected!r}")
        self._keys({key: value for key, value in document.items() if key not in optional}, "$", keys)
        return document

    def table(self, document: dict[str, Any]) -> tuple[Cells, dict[str, Any]]:
        """Read what schedules and programs have in common: their cells, and the fields that are no columns."""
        placement = self._placement(document["placement"])
        num_microbatches = self._count(document["microbatches"], "microbatches")
        num_slices = self._count(document["slices"], "slices")
        routes = self.numbers(document["route_of_microbatch"], "route_of_microbatch", len(placement.routes) - 1)
        if len(routes) != num_microbatches:
            problem = f"{len(routes)} entries; expected {num_microbatches}, one each"
            raise self.fail("route_of_microbatch", problem)
        cells = self._cells(document["ranks"], placement.num_ranks)
        if problem := too_sparse(len(cells.op), placement.num_stages, num_microbatches, num_slices):
            raise self.fail("microbatches", problem)
        fields = {
            "name": self.require(str, document["name"], "name", _TEXT),
            "placement": placement,
            "num_microbatches": num_microbatches,
            "num_slices": num_slices,
            "route_of_microbatch": np.array(routes, np.int8 if len(placement.routes) < 128 else np.int32),
        }
        return cells, fields

    def column(self, value: Any, path: str, cells: Cells) -> Int32s:
        """Read one number per row, given as one list per rank."""
        rows = self.number_lists(value, path, MAX_NUMBER)
        lengths = np.diff(cells.offsets).tolist()
        if len(rows) != len(lengths):
            raise self.fail(path, f"{len(rows)} lists; expected {len(lengths)}, one per rank")
        for rank, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(row) != length:
                raise self.fail(f"{path}[{rank}]", f"{len(row)} numbers; expected {length}, one per instruction")
        return np.concatenate([np.zeros(0, np.int32), *(np.array(row, np.int32) for row in rows)])

    def number_lists(self, value: Any, path: str, largest: int) -> list[list[int]]:
        lists = self.require(list, value, path, _LIST)
        return [self.numbers(entry, f"{path}[{index}]", largest) for index, entry in enumerate(lists)]

    def numbers(self, value: Any, path: str, largest: int) -> list[int]:
        """Read a list of whole numbers from 0 to `largest`."""
        entries = self.require(list, value, path, _LIST)
        for index, entry in enumerate(entries):
            if type(entry) is not int or not 0 <= entry <= largest:
                problem = f"{_shown(entry)} does not fit; expected a whole number from 0 to {largest}"
                raise self.fail(f"{path}[{index}]", problem)
        return entries

    def _placement(self, value: Any) -> Placement:
        self.require(dict, value, "placement", f"object; expected keys {', '.join(_PLACEMENT_KEYS)}")
        parts = self._keys(value, "placement", _PLACEMENT_KEYS)
        ranks = self.numbers(parts["rank_of_stage"], "placement.rank_of_stage", MAX_NUMBER)
        routes = self.number_lists(parts["routes"], "placement.routes", max(len(ranks) - 1, 0))
        style = self.require(str, parts["style"], "placement.style", _TEXT)
        if style not in STYLES:
            problem = f"{_shown(style)} is no style; expected {', '.join(STYLES)}.{nearest(style, STYLES)}"
            raise self.fail("placement.style", problem)
        try:
            return Placement(style, tuple(ranks), tuple(tuple(route) for route in routes))
        except ScheduleError as error:
            raise self.fail("placement", str(error)) from None

    def _cells(self, value: Any, num_ranks: int) -> Cells:
        rows = self.require(list, value, "ranks", _LIST)
        if len(rows) != num_ranks:
            raise self.fail("ranks", f"{len(rows)} lists; expected {num_ranks}, as the placement has")
        for rank, row in enumerate(rows):
            for index, cell in enumerate(self.require(list, row, f"ranks[{rank}]", _LIST)):
                self.require(str, cell, f"ranks[{rank}][{index}]", _TEXT)
        return parse_cells(
            rows,
            lambda problem, rank, cell, offset: self.fail(f"ranks[{rank}][{cell}], character {offset + 1}", problem),
        )

    def _keys(self, value: dict[str, Any], path: str, keys: tuple[str, ...]) -> dict[str, Any]:
        for key in value:
            if key not in keys:
                hint = f"expected {', '.join(keys)}.{nearest(key, keys)}"
                raise self.fail(path, f"{_shown(key)} is no key of it; {hint}")
        for key in keys:
            if key not in value:
                raise self.fail(path, f'the key "{key}" is missing; expected all of {", ".join(keys)}')
        return value

    def _count(self, value: Any, path: str) -> int:
        if type(value) is not int or not 1 <= value <= MAX_NUMBER:
            raise self.fail(path, f"{_shown(value)} does not fit; expected a whole number from 1 to {MAX_NUMBER}")
        return value


def _shown(value: Any) -> str:
    """A value as JSON, cut short."""
    try:
        text = _dump(value)
    except orjson.JSONEncodeError:
        return "a value that is nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
