"""Timelines as JSON: everything that a `Timeline` holds, so that reading back gives the same one, to the last bit.

    {"format": "penstock-recorded-step", "version": 1, "step": 20, "start_s": [0.0, 0.0012], "end_s": [0.0011, 0.0023],
     "clock_uncertainty_s": 0.0, "message_bytes": [64, 0], "layers_of_stage": [[0, 2], [2, 4]], "layer_weights": [1.0],
     "lead_ins": [[-0.3, -0.2, -0.1]], "data_waits": [], "early_weights": [], "num_replicas": 1, "program": {...}}

`lead_ins` are the prologues of the ranks. A predicted timeline has "source" and "sizes" besides. A recorded one has
"host", with the times of the hosts in columns as `start_s`, and "lanes", the lane of each instruction for other
readers: it follows from the program. Files of earlier versions lack "data_waits", "early_weights", "num_replicas",
"host" and "lanes", or have "rungs" where "reasons" are now.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import pairwise
from math import inf, isfinite
from typing import Any

import numpy as np
import orjson

from penstock.errors import FormatError
from penstock.ir.formats.cells import MAX_NUMBER
from penstock.ir.formats.json_text import JsonReader
from penstock.ir.live import WORKSPACES, StageBytes
from penstock.ir.measured import HostTimes, ImmediateWeights, Prologue
from penstock.ir.operations import OPERATIONS, Op
from penstock.ir.program import Program

TIMELINE_FORMAT = "penstock-recorded-step"
VERSION = 1
_AGAIN = "record the step again"
_MAX_BYTES = 2**63 - 1
_REQUIRED = (
    "format", "version", "step", "start_s", "end_s", "clock_uncertainty_s", "message_bytes", "layers_of_stage",
    "layer_weights", "lead_ins", "program",
)  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {
    "data_waits": [],
    "early_weights": [],
    "num_replicas": 1,
    "source": "measured",
    "sizes": None,
    "host": None,
    "lanes": None,
}
_WAIT_KEYS = ("rank", "microbatch", "begin_s", "end_s")
_WEIGHTS_KEYS = ("stage", "share", "names")
_SOURCES = ("untimed", "predicted", "measured")


def timeline_to_json(timeline: Any) -> str:
    """Write a `Timeline`, whose file imports this one."""
    document = {
        "format": TIMELINE_FORMAT,
        "version": VERSION,
        "step": timeline.step,
        "start_s": timeline.start_s.tolist(),
        "end_s": timeline.end_s.tolist(),
        "clock_uncertainty_s": timeline.clock_uncertainty_s,
        "message_bytes": timeline.message_bytes,
        "layers_of_stage": [[layers.start, layers.stop] for layers in timeline.layers_of_stage],
        "layer_weights": timeline.layer_weights,
        "lead_ins": [[moments.free_s, moments.loaded_s, moments.asked_s] for moments in timeline.prologues],
        "data_waits": [asdict(wait) for wait in timeline.data_waits],
        "early_weights": [
            {"stage": stage, "share": early.share, "names": early.names, "reasons": dict(early.reasons)}
            for stage, early in sorted(timeline.early_weights.items())
        ],
        "num_replicas": timeline.num_replicas,
        **({"source": timeline.source} if timeline.source != "measured" else {}),
        **({"sizes": _sizes_to_json(timeline.sizes)} if timeline.sizes is not None else {}),
        **(_host_to_json(timeline) if timeline.host is not None else {}),
        "program": orjson.loads(timeline.program.to_json()),
    }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE).decode()


def timeline_from_json(text: str, file: str) -> dict[str, Any]:
    """Read what `timeline_to_json` wrote; return the fields of a `Timeline`, its `data_waits` as plain dictionaries.

    `file` is the name for messages. Times are seconds, one per instruction of the program.

    Raises:
        FormatError: the text is no JSON, or a part of it is missing or wrong; it names the first one.
    """
    reader = _TimelineReader(file)
    document = reader.parts(text)
    program = Program.from_json(orjson.dumps(document["program"]).decode(), file=file)
    num_stages, num_rows = program.num_stages, program.num_instructions
    layers = reader.entries(document, "layers_of_stage", reader.layers)
    num_layers = max((part.stop for part in layers), default=0)
    prologues = reader.entries(document, "lead_ins", reader.prologue)
    message_bytes = reader.numbers(document["message_bytes"], "message_bytes", _MAX_BYTES)
    times = {name: reader.seconds(document[name], name) for name in ("start_s", "end_s")}
    layer_weights = reader.entries(document, "layer_weights", partial(reader.second, least=0.0))
    # Per list, its length and the one that the program asks for; message bytes, layers and prologues may be left empty.
    lengths = {
        "start_s": (len(times["start_s"]), num_rows),
        "end_s": (len(times["end_s"]), num_rows),
        "message_bytes": (len(message_bytes), num_stages if message_bytes else 0),
        "layers_of_stage": (len(layers), num_stages if layers else 0),
        "layer_weights": (len(layer_weights), num_layers),
        "lead_ins": (len(prologues), program.num_ranks if prologues else 0),
    }
    for name, (length, expected) in lengths.items():
        if length != expected:
            raise reader.fail(name, f"{length} entries, but {expected} belong there")
    return {
        "program": program,
        "source": reader.source(document["source"]),
        "start_s": np.array(times["start_s"], np.float64),
        "end_s": np.array(times["end_s"], np.float64),
        "sizes": None if document["sizes"] is None else reader.sizes(document["sizes"], program),
        "clock_uncertainty_s": reader.second(document["clock_uncertainty_s"], "clock_uncertainty_s", least=0.0),
        "data_waits": reader.waits(document["data_waits"], program),
        "step": reader.number(document["step"], "step"),
        "message_bytes": tuple(message_bytes),
        "layers_of_stage": tuple(layers),
        "layer_weights": tuple(layer_weights),
        "prologues": tuple(prologues),
        "early_weights": dict(reader.entries(document, "early_weights", partial(reader.early_weights, num_stages))),
        "num_replicas": reader.number(document["num_replicas"], "num_replicas", least=1),
        "host": None if document["host"] is None else _host_from_json(reader, document["host"], num_rows),
    }


def _host_to_json(timeline: Any) -> dict[str, Any]:
    columns = {name: column.tolist() for name, column in timeline.host._asdict().items()}
    return {"host": columns, "lanes": [OPERATIONS[Op(op)].lane.name.lower() for op in timeline.program.op.tolist()]}


def _host_from_json(reader: "_TimelineReader", value: Any, num_rows: int) -> HostTimes:
    members, columns = reader.keys(value, "host", HostTimes._fields), []
    for name in HostTimes._fields:
        column = reader.seconds(members[name], f"host.{name}")
        if len(column) != num_rows:
            raise reader.fail(f"host.{name}", f"{len(column)} entries, but {num_rows} belong there")
        columns.append(np.array(column, np.float64))
    return HostTimes(*columns)


def _sizes_to_json(sizes: StageBytes) -> dict[str, Any]:
    values = {entry.name: getattr(sizes, entry.name) for entry in fields(sizes)}
    for name in WORKSPACES:  # an older Penstock knows none
        if not values[name].any():
            del values[name]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


class _TimelineReader(JsonReader):
    """Checks the parts of a timeline's document, and names the JSON path of the first that is wrong."""

    def fail(self, path: str, problem: str) -> FormatError:
        return super().fail(path, f"{problem}; {_AGAIN}")

    def parts(self, text: str) -> dict[str, Any]:
        """Return the top level with all of its keys."""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            problem = f"this is no JSON: {error.msg}; the file is cut short or was changed. Record the step again"
            raise FormatError(problem, file=self._file, line=error.lineno, column=max(error.colno, 1)) from None
        document: dict[str, Any] = self.require(dict, value, "$", "object; expected the keys of a timeline")
        format, version = document.get("format"), document.get("version")
        if format != TIMELINE_FORMAT:
            raise super().fail("format", f"this is no timeline; expected {TIMELINE_FORMAT!r}, which `save` writes")
        if type(version) is int and version > VERSION:
            problem = f"a newer Penstock wrote version {version}; this one reads {VERSION}, so update it"
            raise super().fail("version", problem)
        if version != VERSION or type(version) is not int:
            raise self.fail("version", f"there is no such version; expected {VERSION}")
        return dict(_DEFAULTS) | self.keys(document, "", _REQUIRED, tuple(_DEFAULTS))

    def keys(self, value: Any, path: str, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
        """Return an object that has all `keys`, and no others but the `optional` ones."""
        members: dict[str, Any] = self.require(dict, value, path or "$", f"object; expected keys {', '.join(keys)}")
        prefix = f"{path}." if path else ""
        for key in members:
            if key not in (*keys, *optional):
                raise self.fail(f"{prefix}{key}", "there is no such key")
        for key in keys:
            if key not in members:
                raise self.fail(f"{prefix}{key}", "this key is missing")
        return members

    def entries(self, document: Mapping[str, Any], key: str, read: Callable[[Any, str], Any]) -> list[Any]:
        """Return the entries of the list under `key`, each as `read` reads it at its path."""
        values = self.require(list, document[key], key, "list; expected a list")
        return [read(value, f"{key}[{index}]") for index, value in enumerate(values)]

    def number(self, value: Any, path: str, least: int = 0, most: int = MAX_NUMBER) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self.fail(path, f"expected a whole number from {least} to {most}")
        return value

    def second(self, value: Any, path: str, least: float = -inf, most: float = inf) -> float:
        if type(value) not in (int, float) or not isfinite(value) or not least <= value <= most:
            raise self.fail(path, "expected a finite number" + (f", {least:g} or more" if least > -inf else ""))
        return float(value)

    def seconds(self, value: Any, path: str) -> list[float]:
        """Read a list of finite numbers."""
        entries = self.require(list, value, path, "list; expected a list")
        if not {float}.issuperset(map(type, entries)):  # a long list of nothing but floats is checked at once
            return [self.second(entry, f"{path}[{index}]") for index, entry in enumerate(entries)]
        return entries

    def source(self, value: Any) -> str:
        if value not in _SOURCES:
            raise self.fail("source", f"expected one of {', '.join(_SOURCES)}")
        return str(value)

    def layers(self, value: Any, path: str) -> range:
        """Read the first layer of a stage, and the one behind its last."""
        bounds = self.numbers(value, path, MAX_NUMBER)
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            raise self.fail(path, "expected the first layer of a stage, and the one behind its last")
        return range(*bounds)

    def prologue(self, value: Any, path: str) -> Prologue:
        moments = self.seconds(value, path)
        if len(moments) != 3:
            raise self.fail(path, f"{len(moments)} moments; expected 3")
        if any(later < earlier for earlier, later in pairwise(moments)):
            raise self.fail(path, f"{moments} goes back in time")
        return Prologue(*moments)

    def early_weights(self, num_stages: int, value: Any, path: str) -> tuple[int, ImmediateWeights]:
        members = self.keys(value, path, _WEIGHTS_KEYS, ("reasons", "rungs"))
        stage = self.number(members["stage"], f"{path}.stage")
        if stage >= num_stages:
            raise self.fail(f"{path}.stage", f"stage {stage}, but there are {num_stages}")
        names = self.texts(members["names"], f"{path}.names")
        reasons = self.require(dict, members.get("reasons", {}), f"{path}.reasons", "object; expected texts by name")
        self.texts(list(reasons.values()), f"{path}.reasons")
        share = self.second(members["share"], f"{path}.share", 0.0, 1.0)
        return stage, ImmediateWeights(share, tuple(names), reasons)

    def texts(self, value: Any, path: str) -> list[str]:
        entries = self.require(list, value, path, "list; expected a list")
        return [self.require(str, entry, path, "text; expected a string") for entry in entries]

    def waits(self, value: Any, program: Program) -> list[dict[str, Any]]:
        """Read waits for data of ranks and microbatches that there are, those of a rank in their order."""
        ends_s, waits = [-inf] * program.num_ranks, []
        for index, entry in enumerate(self.require(list, value, "data_waits", "list; expected a list")):
            path = f"data_waits[{index}]"
            wait = self.keys(entry, path, _WAIT_KEYS)
            rank, microbatch = (self.number(wait[name], f"{path}.{name}") for name in ("rank", "microbatch"))
            begin_s, end_s = (self.second(wait[name], f"{path}.{name}") for name in ("begin_s", "end_s"))
            if rank >= program.num_ranks or microbatch >= program.num_microbatches:
                problem = f"rank {rank}, microbatch {microbatch}, but there are {program.num_ranks} ranks and "
                raise self.fail(path, f"{problem}{program.num_microbatches} microbatches")
            if not ends_s[rank] <= begin_s <= end_s:
                raise self.fail(path, f"from {begin_s} to {end_s} s, which goes back in time")
            ends_s[rank] = end_s
            waits.append({"rank": rank, "microbatch": microbatch, "begin_s": begin_s, "end_s": end_s})
        return waits

    def sizes(self, value: Any, program: Program) -> StageBytes:
        """Read the bytes of stages; `microbatch_factor` has an entry per microbatch, all else one per stage."""
        names = [entry.name for entry in fields(StageBytes)]
        members = self.keys(value, "sizes", [name for name in names if name not in WORKSPACES], WORKSPACES)
        members = dict.fromkeys(WORKSPACES, [0] * program.num_stages) | members
        factor = members["microbatch_factor"]
        factors = None if factor is None else self.seconds(factor, "sizes.microbatch_factor")
        columns = {
            name: self.numbers(members[name], f"sizes.{name}", _MAX_BYTES)
            for name in names
            if name not in ("microbatch_factor", "not_given")
        }
        lengths = {name: (len(column), program.num_stages) for name, column in columns.items()}
        lengths["microbatch_factor"] = (len(factors or ()), program.num_microbatches if factors is not None else 0)
        for name, (length, expected) in lengths.items():
            if length != expected:
                raise self.fail(f"sizes.{name}", f"{length} entries, but {expected} belong there")
        return StageBytes(
            **{name: np.array(column, np.int64) for name, column in columns.items()},
            microbatch_factor=None if factors is None else np.array(factors, np.float64),
            not_given=tuple(self.texts(members["not_given"], "sizes.not_given")),
        )
