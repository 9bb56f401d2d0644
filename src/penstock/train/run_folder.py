"""The folder of a run: what lies in it under which name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from penstock.errors import ConfigError
from penstock.train.config import RunConfig, config_to_toml
from penstock.train.files import atomic_file, naming_storage, remove_abandoned

CONFIG = "config.toml"
TOKENS = "tokens"
SCHEDULE = "schedule.csv"
WEIGHTS = "weights.safetensors"
TIMELINE = "timeline.json"
TRACE = "timeline.trace.json"
PICTURE = "timeline.png"
SUMMARY = "summary.json"
LOG = "rank0.log"
"""Of rank 0; the others have their own number."""
LAYER_TIMES = "layer_times.json"
"""What a split by measured seconds goes by; runs in the folder share it."""
COSTS = "costs.toml"
"""Of `penstock profile`, which a run leaves alone."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that rank 0 writes to; `tokens` is read by every rank."""

    path: Path

    @property
    def tokens(self) -> Path:
        """The cache of tokenized text."""
        return self.path / TOKENS

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Where the block fails, take away the folders that it made, unless something lies in them."""
        if "\0" in str(self.path):
            raise ConfigError(f"{str(self.path)!r} holds a null character, which no path can", key="run.folder")
        made = [folder for folder in (self.tokens, *self.tokens.parents) if not os.path.exists(folder)]
        try:
            yield
        except BaseException:
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
            raise

    def begin(self, config: RunConfig) -> None:
        """Make the folder, write the resolved configuration, and take away what an earlier run found out.

        Weights of an earlier run stay until new ones replace them.

        Raises:
            PenstockError: it is no folder or cannot be written (path and reason).
        """
        with naming_storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.write(CONFIG, config_to_toml(config).encode())
        with naming_storage(self.path):
            for name in (SCHEDULE, TIMELINE, TRACE, PICTURE, SUMMARY):
                (self.path / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Take away what killed ranks left half-written; call it when none of them runs any more."""
        for folder in (self.path, self.tokens):
            remove_abandoned(folder, now_s=inf)

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears whole or not at all. Raises: PenstockError."""
        with atomic_file(self.path / name) as file:
            file.write(content)
