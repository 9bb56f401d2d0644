"""The recorded step of a run as a file: read back, it holds the measured times exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import Field, ValidationError

from penstock.errors import ConfigError, FormatError
from penstock.execute.split.planner import ImmediateWeights
from penstock.ir.program import Program
from penstock.ir.timeline import DataWait, Timeline
from penstock.simulation.prologue import Prologue
from penstock.train.folder.run_folder import CONFIG, TIMELINE
from penstock.train.settings.sections import NotNegative, Section

FORMAT: Literal["penstock-recorded-step"] = "penstock-recorded-step"
"""At the begin of the file."""
Moments = Annotated[list[float], Field(min_length=3, max_length=3)]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """One step as it was measured."""

    step: int
    """Counted from 1."""
    timeline: Timeline
    message_bytes: tuple[int, ...]
    """[num_stages] bytes of each stage's output; 0 for a last stage."""
    layers_of_stage: tuple[range, ...]
    layer_weights: tuple[float, ...]
    """Relative cost per layer, as the split assumed."""
    prologues: tuple[Prologue, ...]
    """Per rank, what it did before the step; empty where that is not known."""
    early_weights: Mapping[int, ImmediateWeights] = field(default_factory=dict)
    """By stage whose backwards are split, which weight gradients were computed in I."""
    num_replicas: int = 1
    """That ran the step together; this is what the first one measured."""


class _Wait(Section):
    rank: NotNegative
    microbatch: NotNegative
    begin_s: float
    end_s: float


class _ImmediateWeights(Section):
    stage: NotNegative
    share: Annotated[float, Field(ge=0, le=1)]
    names: list[str]
    reasons: dict[str, str] = Field(default_factory=dict)
    """Files of before there were any lack them, and have `rungs`."""
    rungs: dict[str, float] = Field(default_factory=dict, exclude=True)


class _Document(Section):
    format: Literal["penstock-recorded-step"] = FORMAT
    version: Literal[1] = 1
    step: Annotated[int, Field(ge=1)]
    start_s: list[float]
    end_s: list[float]
    clock_uncertainty_s: Annotated[float, Field(ge=0)]
    message_bytes: list[NotNegative]
    layers_of_stage: list[Annotated[list[NotNegative], Field(min_length=2, max_length=2)]]
    layer_weights: list[float]
    lead_ins: list[Moments]
    data_waits: list[_Wait] = Field(default_factory=list)
    """Files of before there were any lack them."""
    early_weights: list[_ImmediateWeights] = Field(default_factory=list)
    """Likewise."""
    num_replicas: Annotated[int, Field(ge=1)] = 1
    """Likewise."""
    program: dict[str, Any]


def recorded_step_to_json(recorded: RecordedStep) -> bytes:
    """Return a text that reads back as the same times, to the last bit."""
    timeline = recorded.timeline
    document = _Document(
        step=recorded.step,
        start_s=timeline.start_s.tolist(),
        end_s=timeline.end_s.tolist(),
        clock_uncertainty_s=timeline.clock_uncertainty_s,
        message_bytes=list(recorded.message_bytes),
        layers_of_stage=[[part.start, part.stop] for part in recorded.layers_of_stage],
        layer_weights=list(recorded.layer_weights),
        lead_ins=[[each.free_s, each.loaded_s, each.asked_s] for each in recorded.prologues],
        data_waits=[_Wait(**asdict(wait)) for wait in timeline.data_waits],
        early_weights=[
            _ImmediateWeights(stage=stage, share=found.share, names=list(found.names), reasons=dict(found.reasons))
            for stage, found in sorted(recorded.early_weights.items())
        ],
        num_replicas=recorded.num_replicas,
        program=orjson.loads(timeline.program.to_json()),
    )
    return orjson.dumps(document.model_dump(), option=orjson.OPT_APPEND_NEWLINE)


def recorded_step_from_json(text: bytes, *, file: str = "<text>") -> RecordedStep:
    """Read what `recorded_step_to_json` wrote.

    Raises:
        FormatError: naming the first part that is missing or wrong.
    """
    try:
        document = _Document.model_validate(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        raise FormatError(
            f"this is no JSON: {error.msg}; the file is cut short or was changed. Record the step again",
            file=file,
            line=error.lineno,
            column=max(error.colno, 1),
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "$"
        raise _wrong(f"{place}: {first['msg']}", file) from None
    program = Program.from_json(orjson.dumps(document.program).decode(), file=file)
    _require_whole(document, program, file)
    timeline = Timeline(
        program,
        "measured",
        np.array(document.start_s, np.float64),
        np.array(document.end_s, np.float64),
        clock_uncertainty_s=document.clock_uncertainty_s,
        data_waits=tuple(DataWait(**wait.model_dump()) for wait in document.data_waits),
    )
    return RecordedStep(
        document.step,
        timeline,
        tuple(document.message_bytes),
        tuple(range(first, end) for first, end in document.layers_of_stage),
        tuple(document.layer_weights),
        tuple(Prologue(*moments) for moments in document.lead_ins),
        {each.stage: ImmediateWeights(each.share, tuple(each.names), each.reasons) for each in document.early_weights},
        document.num_replicas,
    )


def _wrong(problem: str, file: str) -> FormatError:
    return FormatError(f"{problem}; record the step again", file=file)


def _require_whole(document: _Document, program: Program, file: str) -> None:
    """Refuse lists whose lengths do not belong together."""
    num_layers = max((end for _, end in document.layers_of_stage), default=0)
    expected = {
        "start_s": program.num_instructions,
        "end_s": program.num_instructions,
        "message_bytes": program.num_stages,
        "layers_of_stage": program.num_stages,
        "layer_weights": num_layers,
        "lead_ins": program.num_ranks if document.lead_ins else 0,
    }
    for name, length in expected.items():
        found = len(getattr(document, name))
        if found != length:
            raise _wrong(f"{name}: {found} entries, but {length} belong there", file)
    wrong = [moments for moments in document.lead_ins if any(later < earlier for earlier, later in pairwise(moments))]
    if wrong:
        raise _wrong(f"lead_ins: {wrong[0]} goes back in time", file)
    stages = [each.stage for each in document.early_weights if each.stage >= program.num_stages]
    if stages:
        raise FormatError(f"early_weights: stage {stages[0]}, but there are {program.num_stages}", file=file)
    _require_waits(document.data_waits, program, file)


def _require_waits(waits: Sequence[_Wait], program: Program, file: str) -> None:
    """Refuse waits for data of ranks and microbatches that there are not, and such as are not in their order."""
    ends_s = [-inf] * program.num_ranks
    for index, wait in enumerate(waits):
        problem = ""
        if wait.rank >= program.num_ranks or wait.microbatch >= program.num_microbatches:
            problem = f"rank {wait.rank}, microbatch {wait.microbatch}, but there are {program.num_ranks} ranks and "
            problem += f"{program.num_microbatches} microbatches"
        elif not ends_s[wait.rank] <= wait.begin_s <= wait.end_s:
            problem = f"from {wait.begin_s} to {wait.end_s} s, which goes back in time"
        if problem:
            raise _wrong(f"data_waits.{index}: {problem}", file)
        ends_s[wait.rank] = wait.end_s


def read_recorded_step(folder: Path) -> RecordedStep:
    """Read the recorded step of a run folder.

    Raises:
        ConfigError: the folder is none, or lacks what is needed; says what, and how to get it.
        FormatError: the file is not whole.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the run folder of `penstock train` (run.folder)")
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} holds no {CONFIG}, so it is no run folder; give the one that run.folder names")
    path = folder / TIMELINE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no {TIMELINE}: the run has not come to its recorded step, or records none. Let it train "
            "on, or run it with --set run.record_step=N, where N is a step that it reaches"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return recorded_step_from_json(text, file=str(path))
