"""A corpus of conversations: JSON lines or Parquet files, of which one column has the messages of a conversation each.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

A document is the JSON text of its messages, so that equal conversations are equal documents, whatever file they are in.
All rows are looked at before the first is read, and those that are no conversations are named together.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from penstock.errors import MAX_SHOWN, ConfigError, cut, nearest, shortened
from penstock.train.data.corpus import FILES_KEY, Document, unreadable
from penstock.train.settings.optional_packages import PARQUET

COLUMN_KEY = "data.column"
ASSISTANT = "assistant"
MAX_VALUE_CHARACTERS = 40


class _NoChat(Exception):
    """What is wrong with a row."""


class ChatFiles:
    """The conversations of some files, each a document."""

    def __init__(self, documents: Sequence[Document], column: str, *, needs_assistant: bool) -> None:
        """Take the conversations of a column; with `needs_assistant`, each must have a turn of the assistant."""
        self._documents = documents
        self._column = column
        self._needs_assistant = needs_assistant

    @cached_property
    def _files(self) -> list["_Rows"]:
        """The files, once all of their rows have been looked at. Raises: ConfigError."""
        files = [_open(document.path, self._column) for document in self._documents]
        problems = [
            f"{file.name(row)}: {problem}"
            for file in files
            for row in range(len(file))
            if (problem := self._problem_of(file, row))
        ]
        if problems:
            raise _refusal(problems)
        return files

    @cached_property
    def _ends(self) -> Any:
        """By file, the number of conversations up to its end."""
        return np.cumsum([len(file) for file in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def num_bytes(self) -> int:
        """About how much there is to read."""
        return sum(document.size_bytes for document in self._documents)

    def stamp(self) -> list[object]:
        """Return plain values that differ where the content may have changed."""
        files = [[str(file.path.absolute()), file.size_bytes, file.modified_ns] for file in self._documents]
        return ["messages", self._column, files]

    def name(self, index: int) -> str:
        """Return what a conversation is called in messages."""
        file, row = self._locate(index)
        return file.name(row)

    def pieces(self, index: int) -> Iterator[bytes]:
        """Yield the JSON text of a conversation's messages. Raises: ConfigError, if the file has changed."""
        file, row = self._locate(index)
        try:
            yield self._content(file, row)
        except _NoChat as error:
            raise ConfigError(f"{file.name(row)}: {error}", key=FILES_KEY) from error

    def _locate(self, index: int) -> tuple["_Rows", int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._files[number], index - (int(self._ends[number - 1]) if number else 0)

    def _problem_of(self, file: "_Rows", row: int) -> str:
        try:
            self._content(file, row)
        except _NoChat as error:
            return str(error)
        return ""

    def _content(self, file: "_Rows", row: int) -> bytes:
        """Return the messages of a row as a document. Raises: _NoChat."""
        try:
            return orjson.dumps(self._messages(file.read(row)))
        except TypeError as error:  # a table may have values that JSON has not
            raise _NoChat(f"has what is no JSON: {error}. Save its messages as texts") from error

    def _messages(self, value: Any) -> list[dict[str, Any]]:
        """Return the messages of a row. Raises: _NoChat."""
        if not isinstance(value, dict):
            raise _NoChat(f"is {_shown(value)}; expected an object with the key {self._column!r}")
        if self._column not in value:
            raise _NoChat(
                f"has no {self._column!r}, but {_listed(value)}.{nearest(self._column, value)} Name the column of "
                "messages in data.column"
            )
        messages = value[self._column]
        if not isinstance(messages, list) or not messages:
            raise _NoChat(f"{self._column!r} is {_shown(messages)}; expected a list of messages")
        for number, message in enumerate(messages):
            _require_message(message, number)
        if self._needs_assistant and all(message["role"] != ASSISTANT for message in messages):
            roles = ", ".join(dict.fromkeys(shortened(message["role"]) for message in messages))
            raise _NoChat(
                f"has no turn of the {ASSISTANT!r}, so that nothing is learned from it; its roles: {roles}. Leave it "
                "out, or set data.learn = 'all'"
            )
        return messages


def _require_message(message: Any, number: int) -> None:
    """Refuse what is no message; its content is for the template to judge. Raises: _NoChat."""
    if not isinstance(message, dict):
        raise _NoChat(f"message {number} is {_shown(message)}; expected an object with the keys 'role' and 'content'")
    if not isinstance(message.get("role"), str):
        problem = (
            f"has the role {_shown(message['role'])}" if "role" in message else f"has no 'role', but {_listed(message)}"
        )
        raise _NoChat(f"message {number} {problem}; expected 'role', such as 'user' or 'assistant', and 'content'")
    content = message.get("content")
    if not isinstance(content, (str, list)) and not (content is None and "tool_calls" in message):
        raise _NoChat(f"message {number} has the content {_shown(content)}; expected a text, or a list of parts")


class _Rows(Protocol):
    """The rows of a file, by number from 0."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """Return what a row is called in messages."""

    def read(self, row: int) -> Any:
        """Return a row. Raises: _NoChat, where it cannot be read."""


class _JsonLines:
    """The lines of a file that are not empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            lengths = [(len(line), bool(line.strip())) for line in file]
        begins = np.cumsum([0, *(length for length, _ in lengths)])
        self._numbers = np.flatnonzero([is_filled for _, is_filled in lengths])
        self._begins = begins[self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, row: int) -> str:
        return f"{self._path}, line {self._numbers[row] + 1}"

    def read(self, row: int) -> Any:
        try:
            with self._path.open("rb") as file:
                file.seek(int(self._begins[row]))
                return orjson.loads(file.readline())
        except OSError as error:
            raise unreadable(self._path, error) from error
        except orjson.JSONDecodeError as error:
            raise _NoChat(f"is not JSON: {error}. Mend the line, or leave it out") from error


class _Parquet:
    """The rows of a Parquet file; what is read of it stays in memory."""

    def __init__(self, path: Path, column: str) -> None:
        self._path = path
        try:
            parquet = PARQUET.load()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.problem}", key=error.key) from error
        try:
            names = parquet.read_schema(path).names
            if column in names:
                self._table = parquet.read_table(path, columns=[column])
        except Exception as error:  # pyarrow has errors of its own
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{path}: cannot be read as Parquet: {reason}. Save it anew, or leave it out", key=FILES_KEY
            ) from error
        if column not in names:
            raise ConfigError(
                f"{path} has no column {column!r}.{nearest(column, names)} Its columns: {', '.join(names)}",
                key=COLUMN_KEY,
            )

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def name(self, row: int) -> str:
        return f"{self._path}, row {row}"

    def read(self, row: int) -> Any:
        [value] = self._table.slice(row, 1).to_pylist()
        return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that a table has for rows without them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _open(path: Path, column: str) -> _Rows:
    try:
        return _Parquet(path, column) if path.suffix == ".parquet" else _JsonLines(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _refusal(problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0], key=FILES_KEY)
    more = [f"  ... {len(problems)} in all"] if len(problems) > MAX_SHOWN else []
    lines = [f"  {problem}" for problem in problems[:MAX_SHOWN]]
    return ConfigError("\n".join([f"{len(problems)} rows are no conversations:", *lines, *more]), key=FILES_KEY)


def _listed(value: dict[str, Any]) -> str:
    return f"the keys {', '.join(map(shortened, value))}" if value else "no keys"


def _shown(value: Any) -> str:
    return cut(orjson.dumps(value, default=str).decode(), MAX_VALUE_CHARACTERS)
