"""The agreement on a step: every rank proposes what it is about to run, and all of them run it or refuse it alike.

It ends the admission of a batch (part 2 of a step).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple, cast

from penstock.errors import EndOfData, PenstockError, StepRefused
from penstock.execute.control.collectives import Control
from penstock.execute.transport.rank_names import RankNames

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
        self.target = given[-1]
        """The digest of the target's layout; 0 where no rank was given one."""
        self.job_signature = self.signature
        """With replicas, that of the batches of all."""

    def widen(self, *, attempt: int, compilations: Sequence[int], signature: str) -> None:
        """Take in what the other replicas have agreed on."""
        self.attempt, self.compilations, self.job_signature = attempt, list(compilations), signature


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
    everyone = Proposals(
        [_proposal(cast(dict[str, Any], theirs)) for theirs in control.all_gather_object(_told(own))], control.names
    )
    everyone.require_same()
    everyone.require_given("inputs", "inputs")
    everyone.require_given("keywords", "keyword arguments")
    is_refused = any(each.refusal for each in everyone.of_rank)
    if not is_refused:
        everyone.require_where_taken("keywords", "keyword arguments", _ON_KEYWORDS)
    everyone.require_streams_in_step()
    everyone.require_given("target", "a target")
    if not is_refused:
        everyone.require_where_taken("target", "a target", _ON_TARGET)
    everyone.require_given("sizes", "microbatches")
    everyone.require_given("lengths", "slices")
    everyone.refuse_together(control.rank)
    return everyone.of_rank


class Proposals:
    """The proposals of all ranks, and the names by which their differences are told."""

    def __init__(self, of_rank: list[StepProposal], names: RankNames) -> None:
        self.of_rank = of_rank
        self._names = names

    def require_same(self) -> None:
        """Refuse a step that the ranks see differently, batches aside. Raises: StepRefused."""
        for name, told in _COMPARED.items():
            ranks = odd_one_out({rank: getattr(each, name) for rank, each in enumerate(self.of_rank)})
            if ranks is not None:
                said = [Said(self._names[rank], self.of_rank[rank]) for rank in ranks]
                raise StepRefused(told(*said), rank=self._names.numbers[ranks[1]])

    def require_given(self, name: str, what: str) -> None:
        """Refuse what differs between ranks that were given it. Raises: StepRefused."""
        ranks = odd_one_out({rank: value for rank, each in enumerate(self.of_rank) if (value := getattr(each, name))})
        if ranks is not None:
            one, other = (self._names[rank] for rank in ranks)
            raise StepRefused(
                f"{one} and {other} were given {what} of different shape or type; "
                "pass the same batch on every rank, or nothing where a rank needs none",
                rank=self._names.numbers[ranks[1]],
            )

    def require_where_taken(self, name: str, what: str, use: str) -> None:
        """Refuse what only some of the ranks got that have a use for it, `takes_...`. Raises: StepRefused."""
        given = [rank for rank, each in enumerate(self.of_rank) if getattr(each, name)]
        takes = f"takes_{name}"
        lacking = [rank for rank, each in enumerate(self.of_rank) if getattr(each, takes) and not getattr(each, name)]
        if given and lacking:
            raise StepRefused(
                f"{self._names[given[0]]} was given {what}, {self._names[lacking[0]]} was not, but {use}",
                rank=self._names.numbers[lacking[0]],
            )

    def require_streams_in_step(self) -> None:
        """Refuse streams of which one is ahead: their ranks would put together inputs and targets of different samples.

        Raises: StepRefused.
        """
        positions = {rank: each.position for rank, each in enumerate(self.of_rank) if each.position}
        ranks = odd_one_out(positions)
        if ranks is not None:
            one, other = ranks
            raise StepRefused(
                f"the stream of {self._names[one]} is at microbatch {positions[one] - 1}, that of {self._names[other]} "
                f"at {positions[other] - 1}; pass new streams over the same data on all ranks",
                rank=self._names.numbers[other],
            )

    def refuse_together(self, rank: int) -> None:
        """Refuse the step where a rank does; the end of the data counts before other reasons. Raises: StepRefused."""
        refusing_ranks = [(each, other) for other, each in enumerate(self.of_rank) if each.refusal]
        for each, other in refusing_ranks:
            if each.is_end_of_data:
                raise EndOfData(each.refusal, rank=self._names.numbers[other])
        if refusing_ranks:
            each, other = refusing_ranks[0]
            own = self.of_rank[rank].refusal
            raise StepRefused(
                own or f"{self._names[other]} refuses the step: {each.refusal}", rank=self._names.numbers[other]
            )


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


class Said(NamedTuple):
    """What one rank proposes."""

    name: str
    step: StepProposal


def _on_modes(one: Said, other: Said) -> str:
    return (
        f"{one.name} runs {one.step.mode.call}, {other.name} runs {other.step.mode.call}; call the same on every rank"
    )


def _on_extras(one: Said, other: Said) -> str:
    """After it only some ranks would wait for what the others have to give."""
    return (
        f"{one.name} was asked for {one.step.extra.call} in this step, {other.name} for {other.step.extra.call}; ask "
        "for the same on every rank"
    )


def _on_draws(one: Said, other: Said) -> str:
    """They would draw different random numbers."""
    return (
        f"{one.name} is at step_number {one.step.step_number}, {other.name} at {other.step.step_number}, but "
        "with a seed random numbers go by it; set pipeline.step_number alike on all ranks, to the training steps that "
        "the run has had"
    )


def _on_scales(one: Said, other: Said) -> str:
    """Some would unscale gradients by another number than the losses are scaled by."""
    return (
        f"the GradScaler of {one.name} has the scale {one.step.scale:g}, that of {other.name} has "
        f"{other.step.scale:g}; call its update() on every rank after each optimizer step, and change or load its "
        "state on all ranks alike"
    )


def _on_sync(one: Said, other: Said) -> str:
    """The replicas of some stages would have the mean of all steps, those of others only of the last."""
    within, outside = (one, other) if other.step.is_synced else (other, one)
    return f"{within.name} is within no_sync(), {outside.name} is not; enter it on every rank for the same steps"


def _on_tied(one: Said, other: Said) -> str:
    """Some would wait for gradients that the others do not send."""
    within, outside = (one, other) if other.step.sums_tied else (other, one)
    return f"{within.name} is within no_sync(tied=False), {outside.name} is not; enter it on every rank alike"


_COMPARED: Mapping[str, Callable[[Said, Said], str]] = {
    "mode": _on_modes,
    "extra": _on_extras,
    "step_number": _on_draws,
    "scale": _on_scales,
    "is_synced": _on_sync,
    "sums_tied": _on_tied,
}
"""Fields of a proposal that are equal on all ranks, and what tells a difference."""
_ON_KEYWORDS = "its layers may take them; pass them on every rank"
"""Its layers would run on their defaults."""
_ON_TARGET = (
    "holds a last stage and so computes losses; pass the target to every rank that holds the last stage of a route"
)
"""The losses of the two ranks would differ in kind."""
