"""The agreement on a step: every rank proposes what it is about to run, and all of them run it or refuse it alike.

It ends the admission of a batch (part 2 of a step).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, cast

from penstock.errors import EndOfData, PenstockError, StepRefused
from penstock.execute.control.collectives import Control

_DIGEST_BYTES = 7
"""Leaves 0 for "nothing given"."""
ALL_FROZEN = 1
"""Stands for parameters of which none needs a gradient; smaller than what stands for others."""


class Mode(IntEnum):
    """What a rank was asked to run."""

    TRAIN = 1
    EVALUATE = 2
    TRAIN_SPLIT = 3
    """Train with every backward in two parts, to measure them."""

    @property
    def is_training(self) -> bool:
        return self is not Mode.EVALUATE

    @property
    def call(self) -> str:
        """What asks for it."""
        return ("step", "evaluate", "a step with split backwards")[self - 1]


class Extra(IntEnum):
    """What a rank was asked to find out about a step; all ranks gather it together when the step is over."""

    NOTHING = 0
    RECORDING = 1
    MEMORY = 2
    VALUES = 3

    @property
    def call(self) -> str:
        """What asks for it."""
        return (
            "nothing besides",
            "a recording (record=True, profile)",
            "a memory report (memory_report)",
            "a look at all values (find_not_finite)",
        )[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProposal:
    """One rank's view of the step that begins; a digest of 0 means that the rank was given nothing."""

    mode: Mode
    inputs: int = 0
    keywords: int = 0
    target: int = 0
    sizes: Sequence[int] = ()
    """Rows of each microbatch; empty where the rank was given nothing to split."""
    lengths: Sequence[int] = ()
    """Per slice of each microbatch, its length; empty where the rank was given nothing to cut."""
    takes_keywords: bool = False
    """Whether the rank has layers that a keyword argument can reach."""
    takes_target: bool = False
    """Whether the rank computes losses."""
    wants_outputs: bool = False
    position: int = 0
    """Where a rank's stream stands, counted from 1; 0 where it has none."""
    values: Sequence[int] = ()
    """Digests of the values of inputs, keyword arguments and target; empty where they are not compared."""
    attempt: int = 0
    """How many steps the rank had begun before, those that failed or were refused included."""
    step_number: int = 0
    """What the step draws its random numbers by; 0 where it draws none."""
    trained: int = 0
    """Stands for which of the rank's parameters need gradients; 0 without parameters, and where none is to get one."""
    extra: Extra = Extra.NOTHING
    scale: float = 0.0
    """The scale of the rank's GradScaler; 0 where it has none."""
    is_synced: bool = True
    """Whether gradients are averaged over replicas; not within `no_sync()`."""
    sums_tied: bool = True
    """Whether gradients of tied parameters are summed over their ranks; not within `no_sync(tied=False)`."""
    num_compilations: int = 0
    """What it says of its compilations (`Compilations.told`); 0 where none of its layers are compiled."""
    refusal: str = ""
    """Why the rank cannot run the step."""
    is_end_of_data: bool = False
    """Whether it refuses the step because its stream is over."""


_FIELDS = tuple(field.name for field in fields(StepProposal))


class AgreedStep:
    """What all ranks know of a step that they run."""

    def __init__(self, proposals: Sequence[StepProposal]) -> None:
        self.sizes = _first_given([each.sizes for each in proposals])
        """Rows of each microbatch, from whichever rank knows them; empty if none does."""
        self.lengths = _first_given([each.lengths for each in proposals])
        """Lengths of the slices, likewise."""
        self.wanting_outputs = frozenset(rank for rank, each in enumerate(proposals) if each.wants_outputs)
        self.attempt = max(each.attempt for each in proposals)
        """A number that no step of these ranks has had before."""
        self.trained = digest(str([each.trained for each in proposals])) if any(e.trained for e in proposals) else 0
        """Stands for all parameters of all ranks that need gradients; 0 where none is to get one."""
        self.is_frozen = max(each.trained for each in proposals) == ALL_FROZEN
        """Whether a training step has parameters, but none on any rank that needs a gradient."""
        given = [max(getattr(each, name) for each in proposals) for name in ("inputs", "keywords", "target")]
        self.compilations = [each.num_compilations for each in proposals]
        """By rank."""
        self.is_training = proposals[0].mode.is_training
        self.signature = " ".join(map(str, (proposals[0].mode.name, *given, self.trained)))
        """What all ranks know of the batch: equal signatures mean equal shapes on every stage."""


def digest(text: str) -> int:
    """Return a positive number that stands for the text on all ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big") | 1


def refusing(error: PenstockError) -> dict[str, Any]:
    """Return the fields of a proposal that refuses the step with an error."""
    return {"refusal": str(error) or type(error).__name__, "is_end_of_data": isinstance(error, EndOfData)}


def agree_on_step(control: Control, own: StepProposal) -> list[StepProposal]:
    """Exchange what every rank is about to run; one small gather.

    Raises:
        StepRefused: if the ranks run different things, or one refuses; the same on every rank, and no data has been
            sent yet.
    """
    everyone = [_proposal(cast(dict[str, Any], theirs)) for theirs in control.all_gather_object(_told(own))]
    _require_same("mode", everyone, _on_modes)
    _require_same("extra", everyone, _on_extras)
    _require_same("step_number", everyone, _on_draws)
    _require_same("scale", everyone, _on_scales)
    _require_same("is_synced", everyone, _on_sync)
    _require_same("sums_tied", everyone, _on_tied)
    _require_given("inputs", everyone, "inputs")
    _require_given("keywords", everyone, "keyword arguments")
    is_refused = any(each.refusal for each in everyone)
    if not is_refused:
        _require_where_taken("keywords", everyone, "keyword arguments", _ON_KEYWORDS)
    _require_streams_in_step(everyone)
    _require_given("target", everyone, "a target")
    if not is_refused:
        _require_where_taken("target", everyone, "a target", _ON_TARGET)
    _require_given("sizes", everyone, "microbatches")
    _require_given("lengths", everyone, "slices")
    _refuse_together(everyone, control.rank)
    return everyone


def _told(own: StepProposal) -> dict[str, object]:
    return {name: getattr(own, name) for name in _FIELDS}  # asdict would copy every value, deeply


def _proposal(told: Mapping[str, Any]) -> StepProposal:
    fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in told.items()}
    return StepProposal(**fields | {"mode": Mode(told["mode"]), "extra": Extra(told["extra"])})


def _first_given(views: Sequence[Sequence[int]]) -> Sequence[int]:
    return next((view for view in views if any(view)), ())


def odd_one_out(found: Mapping[int, object]) -> tuple[int, int] | None:
    """Of what ranks have, return a rank that has what most have and the first one that has not; None if all agree."""
    values = list(found.values())
    if not values or values.count(values[0]) == len(values):
        return None
    usual = max(values, key=values.count)
    one = next(rank for rank, value in found.items() if value == usual)
    return one, next(rank for rank, value in found.items() if value != usual)


def _require_same(
    name: str, proposals: Sequence[StepProposal], told: Callable[[Sequence[StepProposal], int, int], str]
) -> None:
    ranks = odd_one_out({rank: getattr(each, name) for rank, each in enumerate(proposals)})
    if ranks is not None:
        raise StepRefused(told(proposals, *ranks), rank=ranks[1])


def _on_modes(everyone: Sequence[StepProposal], one: int, other: int) -> str:
    modes = everyone[one].mode, everyone[other].mode
    return f"rank {one} runs {modes[0].call}, rank {other} runs {modes[1].call}; call the same on every rank"


def _on_extras(everyone: Sequence[StepProposal], one: int, other: int) -> str:
    """After it only some ranks would wait for what the others have to give."""
    return (
        f"rank {one} was asked for {everyone[one].extra.call} in this step, rank {other} for "
        f"{everyone[other].extra.call}; ask for the same on every rank"
    )


def _on_draws(everyone: Sequence[StepProposal], one: int, other: int) -> str:
    """They would draw different random numbers."""
    return (
        f"rank {one} is at step_number {everyone[one].step_number}, rank {other} at {everyone[other].step_number}, but "
        "with a seed random numbers go by it; set pipeline.step_number alike on all ranks, to the training steps that "
        "the run has had"
    )


def _on_scales(everyone: Sequence[StepProposal], one: int, other: int) -> str:
    """Some would unscale gradients by another number than the losses are scaled by."""
    return (
        f"the GradScaler of rank {one} has the scale {everyone[one].scale:g}, that of rank {other} has "
        f"{everyone[other].scale:g}; call its update() on every rank after each optimizer step, and change or load its "
        "state on all ranks alike"
    )


def _on_sync(everyone: Sequence[StepProposal], one: int, other: int) -> str:
    """The replicas of some stages would have the mean of all steps, those of others only of the last."""
    within, outside = (one, other) if everyone[other].is_synced else (other, one)
    return f"rank {within} is within no_sync(), rank {outside} is not; enter it on every rank for the same steps"


def _on_tied(everyone: Sequence[StepProposal], one: int, other: int) -> str:
    """Some would wait for gradients that the others do not send."""
    within, outside = (one, other) if everyone[other].sums_tied else (other, one)
    return f"rank {within} is within no_sync(tied=False), rank {outside} is not; enter it on every rank alike"


def _require_given(name: str, proposals: Sequence[StepProposal], what: str) -> None:
    """Refuse what differs between ranks that were given it."""
    ranks = odd_one_out({rank: value for rank, each in enumerate(proposals) if (value := getattr(each, name))})
    if ranks is not None:
        raise StepRefused(
            f"rank {ranks[0]} and rank {ranks[1]} were given {what} of different shape or type; "
            "pass the same batch on every rank, or nothing where a rank needs none",
            rank=ranks[1],
        )


_ON_KEYWORDS = "its layers may take them; pass them on every rank"
"""Its layers would run on their defaults."""
_ON_TARGET = (
    "holds a last stage and so computes losses; pass the target to every rank that holds the last stage of a route"
)
"""The losses of the two ranks would differ in kind."""


def _require_where_taken(name: str, proposals: Sequence[StepProposal], what: str, use: str) -> None:
    """Refuse what only some of the ranks got that have a use for it, `takes_...`."""
    given = [rank for rank, each in enumerate(proposals) if getattr(each, name)]
    lacking = [
        rank for rank, each in enumerate(proposals) if getattr(each, f"takes_{name}") and not getattr(each, name)
    ]
    if given and lacking:
        raise StepRefused(
            f"rank {given[0]} was given {what}, rank {lacking[0]} was not, but {use}",
            rank=lacking[0],
        )


def _require_streams_in_step(proposals: Sequence[StepProposal]) -> None:
    """Refuse streams of which one is ahead: their ranks would put inputs and targets of different samples together."""
    positions = {rank: each.position for rank, each in enumerate(proposals) if each.position}
    ranks = odd_one_out(positions)
    if ranks is not None:
        one, other = ranks
        raise StepRefused(
            f"the stream of rank {one} is at microbatch {positions[one] - 1}, that of rank {other} at "
            f"{positions[other] - 1}; pass new streams over the same data on all ranks",
            rank=other,
        )


def _refuse_together(proposals: Sequence[StepProposal], rank: int) -> None:
    """Refuse the step where a rank does; the end of the data counts before other reasons."""
    refusing_ranks = [(each, other) for other, each in enumerate(proposals) if each.refusal]
    for each, other in refusing_ranks:
        if each.is_end_of_data:
            raise EndOfData(each.refusal, rank=other)
    if refusing_ranks:
        each, other = refusing_ranks[0]
        own = proposals[rank].refusal
        raise StepRefused(own or f"rank {other} refuses the step: {each.refusal}", rank=other)
