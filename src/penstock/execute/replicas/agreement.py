"""The second hop of the agreement on a step: replicas compare what each has agreed on, and weigh their batches.

    first hop     the ranks of a replica agree on its batch, or refuse it          control/agreement.py
    second hop    verdict, mode, attempt, and the weight of the replica's batch    here

So weights are shares of the whole job before the first backward, and gradients are summed, never divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from penstock.errors import EndOfData, StepRefused
from penstock.execute.control.agreement import RULES, AgreedStep, BatchWeight, StepProposal, digest
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import Rule, require_equal

_STEP = ("mode", "extra", "step_number", "scale", "no_sync")
"""Fields of a proposal that are equal in all replicas."""
_RULES = {name: RULES[name] for name in _STEP} | {
    "trained": Rule("Freeze and unfreeze parameters on all replicas alike", "parameters that need gradients"),
    "has_target": Rule("Pass a target to every replica, or to none"),
    "has_rows": Rule("Pass every replica a batch of the same form, with rows to split"),
}


def agree_across(
    control: Control, own: StepProposal, agreed: AgreedStep, weight: BatchWeight, values: Sequence[int] = ()
) -> AgreedStep:
    """Agree with the other replicas on a step that this one has `agreed` on; one small gather.

    `values` are the digests of this rank's batch, where it has read all of it.

    Raises:
        StepRefused: on every rank alike, if a replica refuses the step, or they differ.
    """
    report = {name: getattr(own, name) for name in _STEP} | {
        "attempt": agreed.attempt,
        "trained": agreed.trained,
        "compilations": agreed.compilations,
        "signature": agreed.signature,
        "has_target": agreed.has_target,
        "has_rows": weight.rows > 0,
        "values": list(values),
        "weight": [weight.rows, weight.count, weight.num_microbatches],
    }
    everyone = control.across(report)
    _refuse(everyone, None)
    places = control.places
    firsts = [places.replica_of(replica).start for replica in range(places.num_replicas)]
    require_equal(everyone, control.names.select(firsts), _RULES, StepRefused)  # the first ranks stand for replicas
    weights = [BatchWeight(*theirs["weight"]) for theirs in everyone]
    digests = [theirs["values"] for theirs in everyone]
    return replace(
        agreed,
        attempt=max(theirs["attempt"] for theirs in everyone),
        compilations=[number for theirs in everyone for number in theirs["compilations"]],
        job_signature=str(digest(str([theirs["signature"] for theirs in everyone]))),
        weight=BatchWeight(
            sum(each.rows for each in weights),
            sum(each.count for each in weights),
            sum(each.num_microbatches for each in weights),
        ),
        most_microbatches=max(each.num_microbatches for each in weights),
        has_equal_batches=any(digests[0]) and all(each == digests[0] for each in digests),
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
