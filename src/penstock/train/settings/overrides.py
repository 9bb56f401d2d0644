"""Reading a TOML file, and changing single values of it through dotted overrides."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import MAX_KEY_CHARACTERS, MAX_PATH_CHARACTERS, ConfigError, FormatError, cut, shortened
from penstock.simulation.costs.file import toml_table

Table = dict[str, object]


def read_toml(path: Path) -> Table:
    """Return the table that a TOML file holds, as plain dictionaries and values.

    Raises:
        ConfigError: the file is missing or cannot be read.
        FormatError: it is not UTF-8 or not TOML; says line and column.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{cut(str(path), MAX_PATH_CHARACTERS)}: cannot be read: {reason}. Give the path of a TOML file"
        ) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        valid_bytes = content[: error.start]
        raise FormatError(
            f"byte 0x{content[error.start]:02x} is not UTF-8; a TOML file must be saved as UTF-8",
            file=str(path),
            line=valid_bytes.count(b"\n") + 1,
            column=error.start - valid_bytes.rfind(b"\n"),
        ) from error
    return toml_table(text, file=str(path))


def apply_overrides(table: Mapping[str, object], overrides: Sequence[str]) -> Table:
    """Return a copy of `table` in which each `section.key=value` has been set.

    A value is read as TOML (`32`, `true`, `["a", "b"]`) and taken as a plain string where it is none (`runs/demo`).

    Raises:
        ConfigError: an override is not `key=value`, sets a key that another one sets, or passes through a key that
            holds no table.
    """
    result: Table = dict(table)
    text_by_key: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            problem = f"override {shortened(override)} is not of the form section.key=value"
            raise ConfigError(f"{problem}, as in batch.size=32")
        name, value = ".".join(names), text.strip()
        if name in text_by_key:
            settings = (cut(f"{name}={value_text}", MAX_KEY_CHARACTERS) for value_text in (text_by_key[name], value))
            raise ConfigError(f"is set twice, {' and '.join(settings)}; keep one", key=name)
        text_by_key[name] = value
        result = _with_value(result, names, _parse_value(value, name), ())
    return result


def _with_value(table: Table, names: Sequence[str], value: object, above: tuple[str, ...]) -> Table:
    """Return a copy of `table` with the value under the nested `names`; `above` is the way down to the table."""
    name, inner_names = names[0], names[1:]
    if not inner_names:
        return {**table, name: value}
    inner = table.get(name, {})
    if not isinstance(inner, dict):
        key, inner_key = ".".join((*above, name)), ".".join((*above, *names))
        raise ConfigError(f"holds {shortened(inner)}, not a table, so {inner_key} cannot be set", key=key)
    return {**table, name: _with_value(inner, inner_names, value, (*above, name))}


def _parse_value(text: str, key: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"{cut(text, MAX_KEY_CHARACTERS)} is not a TOML value: {error}", key=key) from error
        return text
    return parsed["value"] if len(parsed) == 1 else text
