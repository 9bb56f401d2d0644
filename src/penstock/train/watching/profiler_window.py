"""`ProfilerWindow`: some steps of a run under torch's profiler, with a trace of each rank in the run folder."""

import gzip
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.errors import PenstockError
from penstock.execute.accelerator import is_queued, memory_snapshot
from penstock.files import atomic_file, naming_storage
from penstock.train.folder.run_folder import MEMORY, PROFILE
from penstock.train.settings.sections import ProfileSection

LOG = logging.getLogger("penstock")


class ProfilerWindow:
    """Profiles the steps that `[profile]` asks for; every rank has one, and writes its own files.

    A run that is interrupted within the window, or begins there, keeps what there is. Files that cannot be written are
    told by a warning: a run does not end for them.
    """

    def __init__(self, options: ProfileSection, folder: Path, rank: int, device: torch.device) -> None:
        self._options = options
        self._folder = folder
        self._rank = rank
        self._device = device
        self._profiler: profile | None = None

    def has(self, step: int) -> bool:
        """Whether a step is in the window."""
        return bool(self._options.steps) and self._options.steps[0] <= step <= self._options.steps[1]

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Run a step, in a range of its name if it is profiled; write the profile behind the last one."""
        if not self.has(step):
            yield
            return
        if self._profiler is None:
            # None: the accelerator's too.
            activities = None if is_queued(self._device) else [ProfilerActivity.CPU]
            profiler = profile(activities=activities, profile_memory=self._options.memory)
            profiler.start()
            self._profiler = profiler
        with record_function(f"step {step}"):
            yield
        if step == self._options.steps[1]:
            self.close()

    def close(self) -> None:
        """End the profile, if there is one, and write it."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        try:
            self._write(profiler)
        except PenstockError as error:
            LOG.warning("rank %d: the profile is lost: %s", self._rank, error)

    def _write(self, profiler: profile) -> None:
        with naming_storage(self._folder), TemporaryDirectory() as scratch:
            path = Path(scratch) / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace = path.read_bytes()
        if self._options.memory:
            document = orjson.loads(trace)
            document["traceEvents"] += memory_counters(document["traceEvents"])  # curves over the ranges
            trace = orjson.dumps(document)
        self._put(PROFILE, trace)
        snapshot = memory_snapshot(self._device) if self._options.memory else None
        if snapshot is not None:
            self._put(MEMORY, orjson.dumps(snapshot, default=str))

    def _put(self, name: str, content: bytes) -> None:
        with atomic_file(self._folder / name.replace("*", str(self._rank))) as file:
            file.write(gzip.compress(content, compresslevel=6))


def memory_counters(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return counters of the bytes that tensors take, one per device, from the allocations in a trace of Kineto.

    Viewers of traces draw a counter as a curve.
    """
    return [
        {
            "ph": "C",
            "name": f"allocated, {_device_name(event['args'])}",
            "pid": event["pid"],
            "ts": event["ts"],
            "args": {"bytes": event["args"]["Total Allocated"]},
        }
        for event in events
        if event.get("name") == "[memory]"
    ]


def _device_name(arguments: Mapping[str, Any]) -> str:
    number = arguments["Device Id"]
    return "CPU" if number < 0 else f"device {number}"
