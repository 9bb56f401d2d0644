"""The folder of checkpoints: `step-N` for each, under another name until it is whole and while it is removed.

step-50/                 whole when it got this name
step-100.1f3a.partial/   being written, or being removed; nobody reads it
"""

import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

from penstock.errors import NotSaved
from penstock.files import ABANDONED_AFTER_S, PARTIAL_SUFFIX, flush

DAMAGED_SUFFIX = ".damaged"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None where it is no such name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder with a checkpoint per step."""

    path: Path

    def steps(self) -> list[int]:
        """Return the steps that have a folder, the newest first."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        steps = [step_of(self.path / name) for name in names if (self.path / name).is_dir()]
        return sorted((step for step in steps if step is not None), reverse=True)

    def of_step(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def begin(self, step: int) -> Path:
        """Make the folder in which the files of a checkpoint are written. Raises: OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep(older_than_s=ABANDONED_AFTER_S)
        partial = self._unused_name(step)
        partial.mkdir()
        return partial

    def announce(self, partial: Path, step: int) -> Path:
        """Give a whole checkpoint its name; its files must be on the disk already. Raises: OSError."""
        flush(partial)
        path = self.of_step(step)
        if path.exists():
            raise NotSaved(
                f"{path}: exists already, and a checkpoint is never written over. Remove it, or save in another folder"
            )
        os.rename(partial, path)
        flush(self.path)
        return path

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved again. Raises: OSError."""
        path = self.of_step(step)
        numbered_paths = (path.with_name(f"{path.name}{DAMAGED_SUFFIX}-{number}") for number in count(1))
        free_path = next(numbered_path for numbered_path in numbered_paths if not numbered_path.exists())
        os.rename(path, free_path)
        flush(self.path)
        return free_path

    def retain(self, newest_step: int, *, keep_last: int, keep_every: int) -> str:
        """Remove the checkpoints up to step `newest_step`, but for the last `keep_last` of them.

        Those of steps that `keep_every` divides stay, too. `keep_last` of 0 keeps all of them, `keep_every` of 0 none
        besides the last. Those of later steps are of another training, such as one that was set back to an earlier
        step, and stay. Return what is wrong where one cannot be removed, or nothing; the next save tries again.
        """
        problem = ""
        earlier = [step for step in self.steps() if step <= newest_step]
        for step in earlier[keep_last:] if keep_last else []:  # they are sorted, the newest first
            if keep_every and step % keep_every == 0:
                continue
            path, partial = self.of_step(step), self._unused_name(step)
            try:
                os.rename(path, partial)  # from here on it is no checkpoint: nobody reads half of one
                shutil.rmtree(partial)
            except OSError as error:
                problem = problem or f"{error.filename or path}: cannot be removed: {error.strerror or error}"
        return problem

    def sweep(self, *, older_than_s: float = 0.0) -> None:
        """Remove the partial folders of writers that were killed, if nobody has written to them for so long."""
        for partial in self.path.glob(f"step-*{PARTIAL_SUFFIX}"):
            with suppress(OSError):
                newest_s = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
                if time.time() - newest_s >= older_than_s:
                    shutil.rmtree(partial)

    def _unused_name(self, step: int) -> Path:
        path = self.of_step(step)
        return path.with_name(f"{path.name}.{uuid4().hex[:12]}{PARTIAL_SUFFIX}")
