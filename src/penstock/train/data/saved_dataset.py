"""A corpus in a folder that the `datasets` package has saved (`save_to_disk`): each row of one column is a document.

The column has texts, or token ids, such as `input_ids`. Its Arrow files are mapped into memory, not loaded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, nearest
from penstock.train.data.corpus import PIECE_BYTES
from penstock.train.data.tokenizer import Tokenizer

ID_TYPE = np.dtype("<u4")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FILES_KEY, COLUMN_KEY = "data.files", "data.column"


class SavedDataset:
    """The rows of one column of a saved data set, each a document."""

    def __init__(self, folder: str, column: str) -> None:
        """Open the folder.

        Raises:
            ConfigError: the package or the folder is missing, the files are damaged, or the column is of neither texts
                nor token ids.
        """
        self._folder = folder
        self._column = column
        dataset = _load(folder)
        if column not in dataset.column_names:
            raise ConfigError(
                f"{folder} has no column {column!r}.{nearest(column, dataset.column_names)} Its columns: "
                f"{', '.join(dataset.column_names)}",
                key=COLUMN_KEY,
            )
        self.has_ids = _has_ids(dataset.features[column], folder, column)
        self._rows = dataset.select_columns([column]).with_format("numpy" if self.has_ids else None)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths())

    def stamp(self) -> list[object]:
        files = [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in self._paths()]
        return ["column", self._column, files]

    def name(self, index: int) -> str:
        return f"{self._folder}, row {index}"

    def pieces(self, index: int) -> Iterator[bytes]:
        """Yield a text as UTF-8, or token ids as 4 bytes each. Raises: ConfigError, if the row cannot be read."""
        try:
            value = self._rows[index][self._column]
        except Exception as error:  # pyarrow has errors of its own, and datasets others
            raise _damaged(self.name(index), error) from error
        content = self._ids(value, index).tobytes() if self.has_ids else (value or "").encode()
        # Text stays whole: a row is in memory already, and tokens at the border of two pieces could be others.
        size = PIECE_BYTES if self.has_ids else max(len(content), 1)
        for begin in range(0, len(content), size):
            yield content[begin : begin + size]

    def _ids(self, value: Any, index: int) -> NDArray[np.uint32]:
        ids = np.asarray([] if value is None else value)
        if len(ids) and not (ids.min() >= 0 and ids.max() < 1 << 32):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ConfigError(
                f"{self.name(index)}: {int(wrong)} is no token id; expected 0 or more, below 2**32", key=COLUMN_KEY
            )
        return ids.astype(ID_TYPE)

    def _paths(self) -> list[Path]:
        return sorted(path for path in Path(self._folder).iterdir() if path.is_file())


def id_tokenizer(vocabulary: int) -> Tokenizer:
    """Return a tokenizer that takes 4 bytes as one token id, which must be below `vocabulary`."""

    def encode(content: bytes) -> NDArray[np.uint32]:
        ids = np.frombuffer(content, dtype=ID_TYPE)
        if len(ids) and int(ids.max()) >= vocabulary:
            raise ConfigError(
                f"{int(ids.max())} is a token of data.column, but the model has {vocabulary}; set model.vocabulary to "
                "that of the tokenizer by which the ids were made",
                key="model.vocabulary",
            )
        return ids.astype(np.uint32)

    return Tokenizer(f"ids below {vocabulary}", vocabulary, encode, str, None)


def _load(folder: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{folder} needs the datasets package: pip install '.[datasets]' in Penstock's clone", key="data.corpus"
        ) from error
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name one that save_to_disk has written", key=FILES_KEY)
    try:
        dataset = datasets.load_from_disk(folder)
    except Exception as error:  # pyarrow has errors of its own, and datasets others
        raise _damaged(folder, error) from error
    if isinstance(dataset, datasets.DatasetDict):
        splits = ", ".join(dataset)
        raise ConfigError(
            f"{folder} holds the splits {splits}; name one, as in {folder}/{next(iter(dataset))}", key=FILES_KEY
        )
    return dataset


def _has_ids(feature: Any, folder: str, column: str) -> bool:
    """Return whether a column has token ids, not texts. Raises: ConfigError, if it has neither."""
    inner = getattr(feature, "feature", None)
    if getattr(inner, "dtype", "") in INTEGERS:
        return True
    if getattr(feature, "dtype", "") in ("string", "large_string"):
        return False
    raise ConfigError(
        f"column {column!r} of {folder} is {feature}; expected texts, or lists of whole numbers", key=COLUMN_KEY
    )


def _damaged(name: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(
        f"{name}: cannot be read: {reason}. Save the data set anew with save_to_disk, or leave it out", key=FILES_KEY
    )
