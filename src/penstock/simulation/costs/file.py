"""Costs as text: in a file, or short, as on a command line.

A file is TOML or JSON: the fields of `Costs` by name, with their unit in the key.

per = "layer"                               of `LayerCosts`, one number per layer; left out for `Costs`, one per stage
forward_ms = [18.5, 18.5, 18.9, 24.1]       or one for all
backward_input_ms = 18.1
backward_weight_ms = 9.3
latency_us = 12
bandwidth_gb_per_s = 25
message_mib = 13.5

[[channels]]                                where one channel differs
sender = 1
receiver = 2
bandwidth_gb_per_s = 12.5
is_exclusive = true

A short text is such as `F=1,I=1,W=1,B=2,transfer=0.1`, in seconds. `F=1,1,1,2` has an entry for each rank or stage.

F, I, W and B are those of one action of one stage (and slice), the same on every stage unless listed. B, the whole
backward, is I + W unless given; without I and W, schedules that split backwards have no costs. R, a forward that runs
again, takes F unless given. `transfer` is a delay between different ranks, 0 unless given. Two actions that overlap
take `overlap` times their sum, 1 unless given. `unshard` gathers the weights of a stage, and `reduce` reduces its
gradients over the replicas; both are 0 unless given.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from penstock.errors import MAX_PATH_CHARACTERS, ConfigError, FormatError, nearest, shortened
from penstock.ir.action import KIND_OF_LETTER, Kind
from penstock.simulation.costs.costs import FIELD_OF_KIND, FIELD_OF_OP, Channel, Costs, Spread
from penstock.simulation.costs.layer_costs import SECONDS, LayerCosts
from penstock.simulation.costs.rules import as_float, not_a_cost
from penstock.simulation.costs.units import Unit, resolve_key

MAX_SHOWN = 60

PER = "per"
"""The key that says what costs are given per."""
LAYER, STAGE = "layer", "stage"

FIELD_OF_KEY = {
    **{kind.letter: FIELD_OF_KIND[kind] for kind in Kind},
    "transfer": "latency_s",
    "overlap": "overlap_factor",
    "unshard": "unshard_s",
    "reduce": "reduce_s",
}
_OF_STAGES = {*FIELD_OF_KIND.values(), *FIELD_OF_OP.values()}
EXAMPLE = "F=1,I=1,W=1,transfer=0.1"

AnyCosts = Costs | LayerCosts
CostType = TypeVar("CostType", Costs, LayerCosts, Channel, Spread)
Table = Mapping[str, object]


def load_costs(argument: str) -> AnyCosts:
    """Read costs from a file, or from a short text such as `F=1,I=1,W=1`: what a user gives as costs.

    Raises:
        ConfigError: if it is neither, or a cost is wrong.
        FormatError: if the file is no TOML or JSON.
    """
    is_file = argument.endswith((".toml", ".json")) or "=" not in argument
    return read_costs(Path(argument)) if is_file else costs_from_text(argument)


def read_costs(path: Path) -> AnyCosts:
    """Read a file; one whose name ends in `.json` is JSON, any other TOML.

    Raises:
        ConfigError: if it cannot be read, or a cost is wrong.
        FormatError: if it is no TOML or JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(
            f"cannot read {shortened(str(path), MAX_PATH_CHARACTERS)}: {reason}; give a TOML or JSON file, or such as "
            f"{EXAMPLE}",
            key="costs",
        ) from None
    read = costs_from_json if path.suffix == ".json" else costs_from_toml
    return read(text, file=str(path))


def costs_from_toml(text: str, *, file: str = "<text>") -> AnyCosts:
    """Read TOML.

    Raises:
        ConfigError: with file and key.
        FormatError: with file, line and column.
    """
    return _from_table(toml_table(text, file=file), file)


def toml_table(text: str, *, file: str = "<text>") -> dict[str, object]:
    """Read TOML as nested tables of plain values. Raises: FormatError, with file, line and column."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)$", str(error))
        end = (text.count("\n") + 1, len(text) - text.rfind("\n"))
        line, column = (int(place[1]), int(place[2])) if place else end
        problem = re.sub(r" \(at [^()]*\)$", "", str(error))
        raise FormatError(f"not TOML: {problem}", file=file, line=line, column=column) from None


def costs_from_json(text: str, *, file: str = "<text>") -> AnyCosts:
    """Read JSON: an object.

    Raises:
        ConfigError: with file and key.
        FormatError: with file, line and column.
    """
    try:
        table = json.loads(text, object_pairs_hook=_object, parse_constant=float)
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg}", file=file, line=error.lineno, column=error.colno) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}", file=file) from None
    if not isinstance(table, dict):
        raise FormatError(f"holds {_shown(table)}; expected an object with costs by name", file=file)
    return _from_table(table, file)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object. Raises: ValueError, for a name that comes twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shortened(duplicate)} is given twice; keep one")
    return members


def _from_table(table: Table, file: str) -> AnyCosts:
    per = table.get(PER, STAGE)
    members = {name: value for name, value in table.items() if name != PER}
    try:
        if per not in (LAYER, STAGE):
            raise ConfigError(f'{_shown(per)}; expected "{STAGE}" or "{LAYER}"', key=PER)
        if per == LAYER:
            return _make(LayerCosts, members, "", source=file)
        return _make(Costs, members, "", source=file)
    except ConfigError as error:
        raise ConfigError(f"{error.problem} (in {file})", key=error.key) from None


def _make(cost_type: type[CostType], table: Table, place: str, **fixed: Any) -> CostType:
    """Make a value whose fields are the keys of a table; `place` stands before the keys in messages.

    The fields in `fixed` have these values, and no key.
    """
    fields_by_key = {key_of(cost_type, field.name): field for field in fields(cost_type) if field.name not in fixed}
    values_by_key: dict[str, Any] = {}
    path_of: dict[str, str] = {}  # where the table names each key, with its unit
    for name, value in table.items():
        key, unit = resolve_key(name, fields_by_key, place)
        if key in values_by_key:
            raise ConfigError(f"says the same as {path_of[key]}; keep one", key=place + name)
        path_of[key] = place + name
        values_by_key[key] = _read(value, fields_by_key[key].type, place + name, unit)
    required = [key for key, field in fields_by_key.items() if field.default is MISSING]
    missing = [key for key in required if key not in values_by_key]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing", key=place.rstrip("."))
    try:
        return cost_type(**{fields_by_key[key].name: value for key, value in values_by_key.items()}, **fixed)
    except ConfigError as error:
        key = key_of(cost_type, error.key.rpartition(".")[2])
        raise ConfigError(error.problem, key=path_of.get(key, error.key)) from None


def key_of(cost_type: type[Any], name: str) -> str:
    """Return the key of a field, which has a unit also where the field is of `LayerCosts` and named without one."""
    return f"{name}_s" if cost_type is LayerCosts and name in SECONDS else name


def _read(value: object, field_type: Any, key: str, unit: Unit) -> Any:
    """Return a value of a table as the type of its field asks, in the unit of the field. Raises: ConfigError."""
    if get_origin(field_type) is tuple:
        return _read_list(value, get_args(field_type)[0], key, unit)
    if field_type is Kind:
        return _kind(value, key)
    if field_type is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{_shown(value)}; expected true or false", key=key)
        return value
    number = unit.convert(_number(value, key))
    if field_type is not int:
        return number
    if number != math.inf and number == int(number):
        return int(number)
    raise ConfigError(f"{shortened(value)} is not a whole number", key=key)


def _read_list(value: object, entry_type: Any, key: str, unit: Unit) -> tuple[Any, ...]:
    if entry_type not in (Channel, Spread):
        entries = value if isinstance(value, list) else [value]
        if not entries:
            raise ConfigError("is empty; give one number for each, or one for all", key=key)
        return tuple(_read(entry, entry_type, key, unit) for entry in entries)
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ConfigError(f"{_shown(value)}; expected a list of tables", key=key)
    return tuple(_make(entry_type, row, f"{key}[{index}].") for index, row in enumerate(value))


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{_shown(value)} is no number", key=key)
    if not value >= 0 or (isinstance(value, int) and as_float(value) == math.inf):  # NaN is not >= 0
        raise not_a_cost(value, key)
    return value


def _kind(value: object, key: str) -> Kind:
    if not isinstance(value, str) or value not in KIND_OF_LETTER:
        raise ConfigError(f"{_shown(value)}; expected one of {', '.join(KIND_OF_LETTER)}", key=key)
    return KIND_OF_LETTER[value]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


# ---- short texts


def costs_from_text(text: str) -> Costs:
    """Read costs such as `F=1,I=1,W=1`: seconds for each kind of computation, and other costs by name.

    A value is one number for all stages, or several with commas between, as in `F=1,1,1,2`, one for each. F is a
    forward, B a whole backward, I its input gradient and W its weight gradient.

    Raises:
        ConfigError: for a key that is unknown, missing or given twice, and a value that is no finite number of 0 or
            more.
    """
    values: dict[str, list[float]] = {}
    last_key = ""
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        # A part without `=` is a further number of the key before it.
        if not equals and _is_further_entry(last_key, key):
            values[last_key].append(_read_value(last_key, key))
            continue
        if not equals:
            raise ConfigError(
                f"{shortened(part)} is not of the form key=value; expected such as {EXAMPLE}, or F=1,1,1,2 with an "
                "entry for each rank",
                key="costs",
            )
        if key not in FIELD_OF_KEY:
            keys = ", ".join(FIELD_OF_KEY)
            hint = nearest(key.upper() if len(key) == 1 else key, FIELD_OF_KEY)
            raise ConfigError(f"there is no cost {shortened(key)}; known: {keys}.{hint}", key="costs")
        if key in values:
            raise ConfigError(f"{key} is given twice; keep one", key="costs")
        values[key], last_key = [_read_value(key, value)], key
    needed_keys = ("F",) if "B" in values and not {"I", "W"} & set(values) else ("F", "I", "W")
    missing_keys = [key for key in needed_keys if key not in values]
    if missing_keys:
        raise ConfigError(
            f"{' and '.join(missing_keys)} missing; give F, and I and W or at least B, such as {EXAMPLE}", key="costs"
        )
    fields: dict[str, Any] = {
        FIELD_OF_KEY[key]: tuple(entries) if FIELD_OF_KEY[key] in _OF_STAGES else entries[0]
        for key, entries in values.items()
    }
    return Costs(**fields)


def _is_further_entry(key: str, text: str) -> bool:
    """Return whether a text is one more number of a cost that may have an entry for each rank."""
    return FIELD_OF_KEY.get(key) in _OF_STAGES and re.match(r"[-+.\d]", text) is not None


def _read_value(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # NaN is neither
        raise ConfigError(f"{key} is {shortened(text)}; give a finite number of 0 or more", key="costs")
    return value
