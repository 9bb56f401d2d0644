"""What the CPU's allocator has given out and not got back during a call, whoever holds it: from torch's profiler.

The profiler sees the allocations of the thread that starts it, those inside autograd included. So a rank is a process
of its own, or the only one.
"""

import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Allocations:
    """Bytes since the call began; moments are in microseconds."""

    levels: Sequence[tuple[float, int]]
    """Moment and bytes alive from then on, in order."""
    ranges: dict[str, tuple[float, float]]
    """By name, begin and end of the last range (`record_function`) of that name."""

    @property
    def rest_bytes(self) -> int:
        """What is alive at the end."""
        return self.levels[-1][1] if self.levels else 0

    def peak_bytes_in(self, name: str) -> int:
        """Return the most that is alive during a range."""
        begin, end = self.ranges[name]
        return max(self._alive(begin), *[num_bytes for moment, num_bytes in self.levels if begin <= moment <= end], 0)

    def bytes_after(self, name: str) -> int:
        """Return what is alive when a range ends."""
        return self._alive(self.ranges[name][1])

    def peak_bytes_after(self, names: Iterable[str]) -> int:
        """Return the most that is alive when any of some ranges ends: what comes and goes within them is not in it."""
        return max(map(self.bytes_after, names))

    def _alive(self, until: float) -> int:
        before = [num_bytes for moment, num_bytes in self.levels if moment <= until]
        return before[-1] if before else 0


def allocations_of(call: Callable[[], object]) -> Allocations:
    """Run a call and return what it allocated."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    levels, alive = [], 0
    for moment, num_bytes in sorted(changes, key=itemgetter(0)):
        alive += num_bytes
        levels.append((moment, alive))
    return Allocations(levels, {each["name"]: _span(each) for each in events if each.get("ph") == "X"})


def _span(event: dict[str, float]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]
