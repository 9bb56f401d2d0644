"""The second hop of the agreement on a step: replicas compare what each has agreed on, and weigh their batches.

    first hop     the ranks of a replica agree on its batch, or refuse it          control/agreement.py
    second hop    verdict, mode, attempt, and the weight of the replica's batch    here

So weights are shares of the whole job before the first backward, and gradients are summed, never divided.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.errors import EndOfData, StepRefused
from penstock.execute.control.agreement import AgreedStep, Extra, Mode, Proposals, StepProposal, digest
from penstock.execute.control.collectives import Control

_COMPARED = ("mode", "extra", "step_number", "scale", "is_synced", "sums_tied")
_DIFFERENCES: Sequence[tuple[Callable[[Mapping[str, Any]], object], str]] = (
    (
        lambda theirs: theirs["trained"],
        "train other parameters (requires_grad); freeze and unfreeze parameters on all replicas alike",
    ),
    (
        lambda theirs: theirs["has_target"],
        "differ in that only one was given a target; pass one to every replica",
    ),
    (
        lambda theirs: theirs["weight"][0] > 0,
        "differ in that only one was given rows to split; pass every replica a batch of the same form",
    ),
)
"""Further values that replicas must have alike, and the words for those who have not."""


@dataclass(frozen=True, slots=True)
class BatchWeight:
    """The weight of a batch."""

    rows: float = 0.0
    count: float = 0.0
    """By `count`, of its targets, where this rank computes losses; else 0."""
    num_microbatches: int = 0


@dataclass(frozen=True, slots=True)
class JobStep:
    """A step, as all replicas know it."""

    weight: BatchWeight
    """Of the batches of all replicas."""
    most_microbatches: int
    """Of any replica; an evaluation of few rows has fewer."""
    has_equal_batches: bool
    """Whether all replicas were given one batch, as far as they have compared it."""


def agree_across(
    control: Control, own: StepProposal, agreed: AgreedStep, weight: BatchWeight, values: Sequence[int] = ()
) -> JobStep:
    """Agree with the other replicas on a step, whose `agreed` becomes that of the job; one small gather.

    `values` are the digests of this rank's batch, where it has read all of it.

    Raises:
        StepRefused: on every rank alike, if a replica refuses the step, or they differ.
    """
    told = {name: getattr(own, name) for name in _COMPARED} | {
        "attempt": agreed.attempt,
        "trained": agreed.trained,
        "compilations": agreed.compilations,
        "signature": agreed.signature,
        "has_target": bool(agreed.target),
        "values": list(values),
        "weight": [weight.rows, weight.count, weight.num_microbatches],
    }
    everyone = control.across(told)
    _refuse(everyone, None)
    _require_alike(control, everyone)
    agreed.widen(
        attempt=max(theirs["attempt"] for theirs in everyone),
        compilations=[number for theirs in everyone for number in theirs["compilations"]],
        signature=str(digest(str([theirs["signature"] for theirs in everyone]))),
    )
    rows, counts, nums_microbatches = zip(*(theirs["weight"] for theirs in everyone), strict=True)
    digests = [theirs["values"] for theirs in everyone]
    return JobStep(
        BatchWeight(sum(rows), sum(counts), sum(nums_microbatches)),
        max(nums_microbatches),
        any(digests[0]) and all(each == digests[0] for each in digests),
    )


def refuse_across(control: Control, own: StepProposal, refused: StepRefused) -> NoReturn:
    """Tell the other replicas that this one refuses the step, and raise that.

    Raises:
        StepRefused: this replica's, or the end of another's data.
    """
    text, is_end = str(refused), isinstance(refused, EndOfData)
    if text == own.refusal and not is_end:  # the words of this rank for itself
        text = f"{control.places.name} refuses the step: {text}"
    _refuse(control.across({"refusal": text, "is_end": is_end, "rank": refused.rank}), refused)
    raise refused


def _refuse(everyone: Sequence[Mapping[str, Any]], own: StepRefused | None) -> None:
    """Raise the refusal of a replica; the end of the data counts before others, then a replica's own."""
    refusals = [theirs for theirs in everyone if "refusal" in theirs]
    ends = [theirs for theirs in refusals if theirs["is_end"]]
    if isinstance(own, EndOfData) or (own is not None and not ends):
        raise own
    if refusals:
        first = (ends or refusals)[0]
        raise (EndOfData if ends else StepRefused)(first["refusal"], rank=first["rank"])


def _require_alike(control: Control, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a step that replicas see differently; messages name the first rank of each. Raises: StepRefused."""
    places = control.places
    names = control.names.select([places.replica_of(replica).start for replica in range(places.num_replicas)])
    compared = ({name: theirs[name] for name in _COMPARED} for theirs in everyone)
    steps = [StepProposal(**each | {"mode": Mode(each["mode"]), "extra": Extra(each["extra"])}) for each in compared]
    Proposals(steps, names).require_same()
    for has, problem in _DIFFERENCES:
        found = list(map(has, everyone))
        for replica, theirs in enumerate(found):
            if theirs != found[0]:
                raise StepRefused(
                    f"the replicas of {names[0]} and {names[replica]} {problem}", rank=names.numbers[replica]
                )
