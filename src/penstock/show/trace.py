"""Timelines as a trace file for Perfetto or chrome://tracing, in the Trace Event Format (JSON).

process: one rank         thread: computations, sends or receives of one timeline
├── predicted             0F0 0F1 ....... 0B0        "X" slices with stage, microbatch and text
├── predicted sends       0SEND_F0 ─────────────┐    flow arrows ("s" to "f") end at the receive
├── predicted receives                          └─▶
├── measured host         0F0 wait: 1RECV_F1 ...     when the host was in the call of a row, or waited for one
├── measured data         data of microbatch 1       waits for what a stream brings, from the step's start on
└── predicted activations                            "C" counter
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.ir.deps import predecessors
from penstock.ir.operations import OPERATIONS, Lane, Op
from penstock.ir.timeline import Timeline
from penstock.show.curve import memory_curves

Event = dict[str, Any]

COMPUTATIONS, SENDS, RECEIVES, OTHERS, COPIES = range(5)
TRACK_NAMES = ("", " sends", " receives", " collectives and step", " copies")
_TRACK_OF_LANE = {Lane.COMPUTE: COMPUTATIONS, Lane.SEND: SENDS, Lane.RECEIVE: RECEIVES, Lane.COPY: COPIES}
_TRACK_OF_OP = np.array([_TRACK_OF_LANE.get(OPERATIONS[op].lane, OTHERS) for op in Op])

MAX_INSTRUCTIONS = 750_000
"""The most instructions of a trace, of about 330 bytes each: viewers refuse files of more than about 250 MB."""


def to_trace(timelines: Mapping[str, Timeline], *, max_instructions: int = MAX_INSTRUCTIONS) -> bytes:
    """Return the named timelines as one Chrome trace (JSON), each beginning at time 0; times are microseconds.

    A rank is a process of the trace, and each timeline has threads there. Slices of one thread must not overlap, so
    messages that are under way at once get their own threads.

    Raises:
        ConfigError: for more instructions than trace viewers open.
    """
    num_instructions = sum(timeline.program.num_instructions for timeline in timelines.values())
    if num_instructions > max_instructions:
        raise ConfigError(
            f"{num_instructions:,} instructions are more than a trace viewer opens ({max_instructions:,}); show fewer "
            "microbatches, or draw SVG or PNG, which merge what cannot be seen",
            key="format",
        )
    events: list[Event] = []
    header: list[Event] = []
    tracks = _Tracks()
    for name, timeline in timelines.items():
        events += _timeline_events(name, timeline, tracks)
    num_ranks = max((timeline.num_ranks for timeline in timelines.values()), default=0)
    # Names and order of processes and threads come first, then the events by time.
    for rank in range(num_ranks):
        header.append(_metadata("process_name", rank, {"name": f"rank {rank}"}))
        header.append(_metadata("process_sort_index", rank, {"sort_index": rank}))
    header += tracks.metadata()
    events.sort(key=lambda event: float(event["ts"]))
    return orjson.dumps({"traceEvents": header + events, "displayTimeUnit": "ms"})


def _metadata(name: str, rank: int, args: Event, thread: int = 0) -> Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}


class _Tracks:
    """Numbers the threads of the trace in the order in which they are first used."""

    def __init__(self) -> None:
        self._threads: dict[tuple[int, str], int] = {}
        self._num_threads: dict[int, int] = {}

    def thread(self, rank: int, name: str) -> int:
        if (rank, name) not in self._threads:
            self._num_threads[rank] = self._num_threads.get(rank, 0) + 1
            self._threads[rank, name] = self._num_threads[rank]
        return self._threads[rank, name]

    def metadata(self) -> list[Event]:
        events = []
        for (rank, name), thread in self._threads.items():
            events.append(_metadata("thread_name", rank, {"name": name}, thread))
            events.append(_metadata("thread_sort_index", rank, {"sort_index": thread}, thread))
        return events


def _timeline_events(name: str, timeline: Timeline, tracks: _Tracks) -> Iterator[Event]:
    """Yield the events of one timeline: slices on threads, arrows of messages, waits for data, and the counter."""
    program = timeline.program
    track_of_row = _TRACK_OF_OP[program.op]
    # Whole nanoseconds: ends and starts that are equal stay equal in the file.
    begin_ns = np.rint(timeline.start_s * 1e9).astype(np.int64)
    end_ns = np.rint(timeline.end_s * 1e9).astype(np.int64)
    # A nanosecond longer than they are: an arrow belongs to a slice only where it starts or ends inside it.
    end_ns += (track_of_row == SENDS) | (track_of_row == RECEIVES)
    threads = np.zeros(program.num_instructions, np.int64)
    for rank in range(program.num_ranks):
        begin, end = int(program.offsets[rank]), int(program.offsets[rank + 1])
        for track, suffix in enumerate(TRACK_NAMES):
            rows = begin + np.flatnonzero(track_of_row[begin:end] == track)
            numbers = _thread_numbers(begin_ns[rows], end_ns[rows], may_nest=track == COMPUTATIONS)
            for row, number in zip(rows, numbers, strict=True):
                thread_name = f"{name}{suffix}" + (f" {number + 1}" if number else "")
                threads[row] = tracks.thread(rank, thread_name)
    yield from _slices(name, timeline, threads, begin_ns, end_ns)
    yield from _arrows(name, timeline, threads, begin_ns, end_ns)
    yield from _host_slices(name, timeline, tracks)
    yield from _data_waits(name, timeline, tracks)
    yield from _counters(name, timeline)


def _thread_numbers(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], *, may_nest: bool) -> list[int]:
    """Return a thread per interval: the first whose last one has ended; equal ones (overlapped pairs) may nest."""
    last_intervals: list[tuple[int, int]] = []  # of each thread
    numbers = []
    for begin, end in zip(begin_ns, end_ns, strict=True):
        interval = (int(begin), int(end))
        free_threads = (
            number for number, last in enumerate(last_intervals) if last[1] <= begin or (may_nest and last == interval)
        )
        number = next(free_threads, len(last_intervals))
        last_intervals[number : number + 1] = [interval]  # replaces that of the thread, or adds a thread
        numbers.append(number)
    return numbers


def _slices(
    name: str, timeline: Timeline, threads: NDArray[np.int64], begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> Iterator[Event]:
    program = timeline.program
    for row, rank in enumerate(program.rank_of_row):
        instruction = program.instruction(row)
        args: Event = {"instruction": str(instruction), "stage": instruction.stage, "timeline": name}
        if not OPERATIONS[instruction.op].is_of_stage:
            args["microbatch"] = instruction.microbatch
        if instruction.slice:
            args["slice"] = instruction.slice
        thread = (int(rank), int(threads[row]))
        if timeline.host is not None:
            host_s = [float(column[row]) for column in timeline.host]
            args |= {"lane": OPERATIONS[instruction.op].lane.name.lower(), "host_start_ms": host_s[0] * 1e3}
            args |= {"host_ms": (host_s[1] - host_s[0]) * 1e3, "host_wait_ms": (host_s[3] - host_s[2]) * 1e3}
        times_ns = (int(begin_ns[row]), int(end_ns[row]))
        yield _slice(str(instruction), instruction.op.name.lower(), thread, times_ns, args)


def _host_slices(name: str, timeline: Timeline, tracks: _Tracks) -> Iterator[Event]:
    """Yield when hosts were in the calls of rows, and when they waited for what rows had launched."""
    if timeline.host is None:
        return
    program = timeline.program
    start_ns, end_ns, wait_start_ns, wait_end_ns = (
        np.rint(np.maximum(column, 0.0) * 1e9).astype(np.int64) for column in timeline.host
    )
    for row, rank in enumerate(program.rank_of_row.tolist()):
        text, thread = str(program.instruction(row)), (rank, tracks.thread(rank, f"{name} host"))
        args = {"instruction": text, "timeline": name}
        yield _slice(text, "host", thread, (int(start_ns[row]), int(end_ns[row])), args)
        if wait_end_ns[row] > wait_start_ns[row]:
            wait_ns = int(wait_start_ns[row]), int(wait_end_ns[row])
            yield _slice(f"wait: {text}", "host wait", thread, wait_ns, args)


def _slice(name: str, category: str, thread: tuple[int, int], times_ns: tuple[int, int], args: Event) -> Event:
    """Return the event of a slice of a thread, which is a rank and a number."""
    (rank, number), (begin_ns, end_ns) = thread, times_ns
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": number, **times, "args": args}


def _arrows(
    name: str, timeline: Timeline, threads: NDArray[np.int64], begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> Iterator[Event]:
    """Yield an arrow from the start of each send to the end of its receive, unless clocks disagree so that it would
    point backward."""
    program = timeline.program
    rank_of_row = program.rank_of_row
    receives = np.flatnonzero(_TRACK_OF_OP[program.op] == RECEIVES)
    sends = predecessors(program)[receives, 0]
    for receive, send in zip(receives, sends, strict=True):
        arrival_ns = int(end_ns[receive]) - 1
        if send < 0 or arrival_ns < begin_ns[send]:
            continue
        arrow = {"name": "message", "cat": "message", "id": f"{name} {program.instruction(int(send))}"}
        yield arrow | {
            "ph": "s", "pid": int(rank_of_row[send]), "tid": int(threads[send]), "ts": int(begin_ns[send]) / 1e3,
        }  # fmt: skip
        yield arrow | {
            "ph": "f", "bp": "e", "pid": int(rank_of_row[receive]), "tid": int(threads[receive]),
            "ts": arrival_ns / 1e3,
        }  # fmt: skip


def _data_waits(name: str, timeline: Timeline, tracks: _Tracks) -> Iterator[Event]:
    for wait in timeline.data_waits:
        begin_ns, end_ns = round(max(wait.begin_s, 0.0) * 1e9), round(wait.end_s * 1e9)
        if end_ns > begin_ns:
            thread = (wait.rank, tracks.thread(wait.rank, f"{name} data"))
            args = {"microbatch": wait.microbatch, "timeline": name}
            yield _slice(f"data of microbatch {wait.microbatch}", "data", thread, (begin_ns, end_ns), args)


def _counters(name: str, timeline: Timeline) -> Iterator[Event]:
    for rank, curve in enumerate(memory_curves(timeline, in_bytes=False)):
        counter = {"name": f"{name} activations", "ph": "C", "pid": rank, "tid": 0}
        for time_s, alive in zip(curve.time_s, curve.alive, strict=True):
            yield counter | {"ts": round(float(time_s) * 1e9) / 1e3, "args": {"activations": int(alive)}}
