"""The second hop of the agreement on a step: replicas compare what each has agreed on, and weigh their batches.

    first hop     the ranks of a replica agree on its batch, or refuse it          control/agreement.py
    second hop    verdict, mode, attempt, and the weight of the replica's batch    here

So weights are shares of the whole job before the first backward, and gradients are summed. They are divided only where
`replica_gradients` asks for it.
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
    control: Control, proposal: StepProposal, agreed: AgreedStep, weight: BatchWeight, values: Sequence[int] = ()
) -> AgreedStep:
    """Agree with the other replicas on a step, and return the agreement with the weight of all their batches.

    The ranks of this replica have agreed on the step before: `agreed` is the result, `proposal` what this rank said.
    `weight` is that of this replica's batch: its rows, what its losses are counted by, and its microbatches. `values`
    has digests of the batch's values where this rank has read all of them, else it is empty. Every rank calls this
    function; it gathers one small report from the ranks at the same place in all replicas.

    Raises:
        StepRefused: on every rank alike, if a replica refuses the step, or if the replicas differ in it.
    """
    local_report = {name: getattr(proposal, name) for name in _STEP} | {
        "attempt": agreed.attempt,
        "trained": agreed.trained,
        "compilations": agreed.compilations,
        "signature": agreed.signature,
        "planned": sorted(agreed.planned),
        "has_target": agreed.has_target,
        "has_rows": weight.rows > 0,
        "values": list(values),
        "weight": [weight.rows, weight.count, weight.num_microbatches, weight.named_counts],
    }
    reports = control.across(local_report)
    _raise_refusal(reports, None)
    # An error names a replica by its first rank.
    places = control.places
    first_ranks = [places.replica_of(replica).start for replica in range(places.num_replicas)]
    require_equal(reports, control.names.select(first_ranks), _RULES, StepRefused)
    # Put the reports together. A replica that has failed alone in a step is ahead in its number of attempts.
    weights = [BatchWeight(*report["weight"]) for report in reports]
    numbers = [batch_weight.num_microbatches for batch_weight in weights]
    if agreed.is_training and len(set(numbers)) > 1:
        listed = ", ".join(map(str, numbers))
        problem = f"the batches of the replicas make {listed} microbatches, by replica; expected as many in each"
        raise StepRefused(f"{problem}. Give the replicas as many rows each, and pass the same microbatches= to all")
    batch_digests = [report["values"] for report in reports]
    return replace(
        agreed,
        attempt=max(report["attempt"] for report in reports),
        compilations=[number for report in reports for number in report["compilations"]],
        planned=frozenset.intersection(*(frozenset(report["planned"]) for report in reports)),
        job_signature=str(digest(str([report["signature"] for report in reports]))),
        weight=BatchWeight(
            sum(batch_weight.rows for batch_weight in weights),
            sum(batch_weight.count for batch_weight in weights),
            sum(batch_weight.num_microbatches for batch_weight in weights),
            {
                name: sum(batch_weight.named_counts.get(name, 0.0) for batch_weight in weights)
                for batch_weight in weights
                for name in batch_weight.named_counts
            },
        ),
        most_microbatches=max(batch_weight.num_microbatches for batch_weight in weights),
        has_equal_batches=any(batch_digests[0]) and all(values == batch_digests[0] for values in batch_digests),
    )


def refuse_across(control: Control, proposal: StepProposal, refusal: StepRefused) -> NoReturn:
    """Tell the other replicas that this one refuses the step, and raise the refusal that counts.

    Raises:
        StepRefused: this replica's, or the end of another's data.
    """
    text, is_end = str(refusal), isinstance(refusal, EndOfData)
    if text == proposal.refusal and not is_end:  # the words of this rank for itself
        text = f"{control.places.name} refuses the step: {text}"
    _raise_refusal(control.across({"refusal": text, "is_end": is_end, "rank": refusal.rank}), refusal)
    raise refusal


def _raise_refusal(reports: Sequence[Mapping[str, Any]], local_refusal: StepRefused | None) -> None:
    """Raise a refusal, if any replica refuses: first the end of the data, then this replica's, then another one's."""
    refusals = [report for report in reports if "refusal" in report]
    data_ends = [report for report in refusals if report["is_end"]]
    if isinstance(local_refusal, EndOfData) or (local_refusal is not None and not data_ends):
        raise local_refusal
    if refusals:
        first = (data_ends or refusals)[0]
        raise (EndOfData if data_ends else StepRefused)(first["refusal"], rank=first["rank"])
