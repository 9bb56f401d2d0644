"""The agreement on a step: every rank proposes what it is about to run, and all of them run it or refuse it alike.

It ends the admission of a batch (part 2 of a step).
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self, cast

import numpy as np

from penstock.errors import EndOfData, PenstockError, PipelineError, StepRefused, described
from penstock.execute.control.collectives import Control
from penstock.execute.control.copy_digests import CopyDigest, require_equal_digests
from penstock.execute.control.handshake import Rule, fix, require_equal, rules_of
from penstock.execute.transport.calls import refused
from penstock.execute.transport.rank_names import RankNames

_DIGEST_BYTES = 7
_LAYOUT = "shapes or types"
ALL_FROZEN = 1
"""Stands for parameters of which none needs a gradient; smaller than what stands for others."""


class Mode(StrEnum):
    """The kind of step that a rank was asked to run, and the call that asks for it."""

    TRAIN = "step"
    EVALUATE = "evaluate"
    TRAIN_SPLIT = "a step with split backwards"
    """Train with every backward in two parts, to measure them."""

    @property
    def is_training(self) -> bool:
        return self is not Mode.EVALUATE


class Extra(StrEnum):
    """An account of a step that a rank was asked for; all ranks gather it together when the step is over."""

    NOTHING = "nothing besides"
    RECORDING = "a recording (record=True, profile)"
    MEMORY = "a memory report (memory_report)"
    VALUES = "a look at all values (find_not_finite)"


def _batch_rule(text: str = "", digest_of: str = "") -> dict[str, Rule]:
    """Return the rule of a part of the batch; `text` says what its values are."""
    return fix(f"{text}Pass the same batch on every rank, or nothing where a rank needs none", digest_of=digest_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProposal:
    """One rank's view of the step that begins; fields with a rule must be equal on all ranks that do not have None."""

    mode: Mode = field(metadata=fix("Call the same on every rank"))
    # If this differed, only some ranks would wait behind the step for what the others have to give.
    extra: Extra = field(default=Extra.NOTHING, metadata=fix("Ask for the same in this step on every rank"))
    step_number: int = field(
        default=0,
        metadata=fix(
            "With a seed random numbers go by it: set pipeline.step_number alike on all ranks, to the training steps "
            "that the run has had"
        ),
    )
    """The step draws its random numbers by it; 0 where it draws none."""
    scale: float = field(
        default=0.0,
        metadata=fix(
            "It is that of the GradScaler: call its update() on every rank after each optimizer step, and change or "
            "load its state on all ranks alike"
        ),
    )
    """The scale of the rank's GradScaler; 0 where it has none."""
    # If this differed, some stages would have the mean of all steps, others of the last one; or ranks would wait for
    # gradients of tied parameters that nobody sends.
    no_sync: str = field(default="none", metadata=fix("Enter no_sync() on every rank for the same steps"))
    """The `no_sync` that the step is within, as the text of its call."""
    # Before the batch, whose parts differ where it is cut into other numbers.
    microbatches: int | str | None = field(
        default=None,
        metadata=fix(
            "Pass the same microbatches= on every rank that is given a part of the batch, or streams that say it"
        ),
    )
    """Number of microbatches into which the rank would cut the batch, or what it follows from; None where the rank was
    given nothing."""
    planned: Sequence[int] = ()
    """Numbers of microbatches whose programs the rank has planned beside its steps."""
    first_microbatch: Sequence[int] = (0, 0, 0)
    """Digests of the layouts of the inputs, keywords and target of the first microbatch; 0 for what was not given, and
    where the microbatches need not be like it."""
    has_alike_layouts: bool = True
    """Whether the rank has seen messages of equal layouts for all microbatches of a kind."""
    inputs: int | None = field(default=None, metadata=_batch_rule(digest_of=_LAYOUT))
    """Digest of the layout of the inputs; None where the rank was given none. `keywords` and `target` are such, too."""
    keywords: int | None = field(default=None, metadata=_batch_rule(digest_of=_LAYOUT))
    position: int | None = field(
        default=None,
        metadata=fix(
            "It is the microbatch at which the stream of a rank stands: pass new streams over the same data on all "
            "ranks"
        ),
    )
    target: int | None = field(default=None, metadata=_batch_rule(digest_of=_LAYOUT))
    sizes: Sequence[int] | None = field(
        default=None,
        metadata=_batch_rule(
            "These are the rows of microbatches: in specs, mark a PreSplit of something other than rows Replicate(). "
        ),
    )
    """Rows of each microbatch; None where the rank was given nothing to split."""
    lengths: Sequence[int] | None = field(default=None, metadata=_batch_rule("These are the lengths of slices. "))
    """Lengths of the slices of one microbatch where all are alike, else of each; None where nothing is to be cut."""
    uncut_rows: Sequence[Sequence[Any]] = ()
    """Pairs (rows, why a batch of so many is refused), from a rank that was given nothing to split."""

    takes_keywords: bool = False
    """Whether the rank has layers that a keyword argument can reach."""
    takes_target: bool = False
    """Whether the rank computes losses."""
    wants_outputs: bool = False
    """Whether the outputs shall stay on this rank, if they are made on it."""
    output_ranks: Sequence[int] | None = field(
        default=None, metadata=fix("Name the same ranks in return_outputs on every rank")
    )
    """The ranks to which the outputs shall go; empty where they shall stay, and None where the rank wants none."""
    values: Sequence[int] = ()
    """Digests of the values of inputs, keyword arguments and target; empty where they are not compared."""
    copies: Sequence[CopyDigest] = ()
    """Digests of the rank's copies of tied parameters; empty where they are not compared."""
    attempt: int = 0
    """Number of steps that the rank has begun before, those that failed or were refused included."""
    trained: int = 0
    """Stands for which of the rank's parameters need gradients; 0 without parameters, and where none is to get one."""
    num_compilations: int = 0
    """What `Compilations.num_reported` says of the rank; 0 where none of its layers are compiled."""
    refusal: str = ""
    """Why the rank cannot run the step."""
    is_end_of_data: bool = False
    """Whether the rank refuses the step because its stream is over."""


_FIELDS = tuple(entry.name for entry in fields(StepProposal))
RULES = rules_of(StepProposal)
"""Rules of the fields that must be equal on all ranks."""


@dataclass(frozen=True, slots=True)
class BatchWeight:
    """The weight of a batch among those of all replicas."""

    rows: float = 0.0
    count: float = 0.0
    """The sum of `count` over its targets, where this rank computes losses; else 0."""
    num_microbatches: int = 0
    named_counts: Mapping[str, float] = field(default_factory=dict)
    """The sum of `count` for each named loss, where it returns a dict; `count` above is the sum of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedStep:
    """A step that all ranks run, as each of them knows it."""

    sizes: Sequence[int]
    """Rows of each microbatch, from whichever rank knows them; empty if none does."""
    asked_microbatches: int | None
    """Number of microbatches, where a rank has cut the batch by a number; None where it follows from their size."""
    planned: frozenset[int]
    """Numbers of microbatches whose programs all ranks have planned beside their steps."""
    first_microbatch: str
    """Stands for the layout of the first microbatch on all ranks; empty where others may be of another one."""
    lengths: Sequence[int]
    """Lengths of slices, as in a `StepProposal`, from whichever rank knows them; empty if none does."""
    wanting_outputs: frozenset[int]
    """Ranks on which the outputs stay, if they are made on them."""
    output_ranks: Sequence[int]
    """Ranks to which the outputs go; empty if none were named."""
    attempt: int
    """A number that no step of these ranks has had before."""
    trained: int
    """Stands for all parameters of all ranks that need gradients; 0 where none is to get one."""
    is_frozen: bool
    """Whether a training step has parameters, but none on any rank that needs a gradient."""
    is_training: bool
    compilations: Sequence[int]
    """What `Compilations.num_reported` says of each rank."""
    signature: str
    """Stands for the batch of all ranks: equal signatures mean equal shapes on every stage."""
    has_target: bool
    """Whether any rank was given a target."""
    job_signature: str
    """Signature of the batches of all replicas."""
    weight: BatchWeight | None = None
    """Weight of the batches of all replicas; None where there is one replica."""
    most_microbatches: int = 0
    """Number of microbatches of the replica that has most; in an evaluation of few rows others have fewer."""
    has_equal_batches: bool = False
    """Whether all replicas were given one batch, as far as they have compared it."""

    @classmethod
    def of(cls, proposals: Sequence[StepProposal]) -> Self:
        """Put together what the ranks of one pipeline have proposed."""
        trained_digests = [proposal.trained for proposal in proposals]
        trained = digest(str(trained_digests)) if any(trained_digests) else 0
        names = ("inputs", "keywords", "target")
        batch_digests = [max(getattr(proposal, name) or 0 for proposal in proposals) for name in names]
        mode = proposals[0].mode
        signature = " ".join(map(str, (mode.name, *batch_digests, trained)))
        return cls(
            sizes=_first_known([proposal.sizes for proposal in proposals]),
            asked_microbatches=next((n for proposal in proposals if isinstance(n := proposal.microbatches, int)), None),
            planned=frozenset.intersection(*(frozenset(proposal.planned) for proposal in proposals)),
            lengths=_first_known([proposal.lengths for proposal in proposals]),
            wanting_outputs=frozenset(rank for rank, proposal in enumerate(proposals) if proposal.wants_outputs),
            output_ranks=_first_known([proposal.output_ranks for proposal in proposals]),
            attempt=max(proposal.attempt for proposal in proposals),
            trained=trained,
            is_frozen=max(trained_digests) == ALL_FROZEN,
            is_training=mode.is_training,
            compilations=[proposal.num_compilations for proposal in proposals],
            signature=signature,
            first_microbatch=_first_microbatch(proposals, trained),
            has_target=batch_digests[-1] > 0,
            job_signature=signature,
        )


def _first_microbatch(proposals: Sequence[StepProposal], trained: int) -> str:
    """Return a text that stands for the layout of the first microbatch; empty where it says nothing of the others."""
    digests = [0, 0, 0]
    for proposal in proposals:
        given = (proposal.inputs, proposal.keywords, proposal.target)
        is_unknown = any(whole and not first for whole, first in zip(given, proposal.first_microbatch, strict=True))
        if is_unknown or not proposal.has_alike_layouts:
            return ""
        digests = list(map(max, digests, proposal.first_microbatch))
    return " ".join(map(str, (proposals[0].mode.name, *digests, trained)))


def require_cut(proposals: Sequence[StepProposal], agreed: AgreedStep, names: RankNames) -> None:
    """Refuse rows of the batch that a rank would hand whole to every microbatch. Raises: StepRefused."""
    num_rows = sum(agreed.sizes)
    for rank, proposal in enumerate(proposals):
        reason = dict(map(tuple, proposal.uncut_rows)).get(num_rows)
        if reason and len(agreed.sizes) > 1:
            raise refused({rank: (reason, False)}, names)


def named_ranks(return_outputs: bool | Collection[int], num_ranks: int) -> tuple[int, ...] | None:
    """Return the ranks that a caller's `return_outputs` names, in ascending order; None where it names none.

    Raises:
        PipelineError: they are no ranks of a pipeline of so many.
    """
    if return_outputs is None or isinstance(return_outputs, bool | np.bool_):
        return None
    ranks: list[Any]
    try:
        ranks = list(return_outputs)
    except TypeError:  # a number is no list of ranks: taken as it is, 0 would be False, and all others True
        ranks = [None]
    if any(type(rank) is not int or rank not in range(num_ranks) for rank in ranks):
        raise PipelineError(
            f"return_outputs is {described(return_outputs)}; expected True, False or ranks from 0 to {num_ranks - 1}, "
            "such as the target_ranks of the pipeline that takes the outputs"
        )
    return tuple(sorted(set(ranks)))


def digest(text: str) -> int:
    """Return a positive number that stands for the text on all ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big") | 1


def refusing(error: PenstockError) -> dict[str, Any]:
    """Return the fields of a proposal that refuses the step with an error."""
    return {"refusal": str(error) or type(error).__name__, "is_end_of_data": isinstance(error, EndOfData)}


def agree_on_step(control: Control, proposal: StepProposal) -> list[StepProposal]:
    """Exchange what every rank is about to run; one small gather.

    Raises:
        StepRefused: if the ranks run different things, or one refuses; the same on every rank, and no data has been
            sent yet.
    """
    report = {name: getattr(proposal, name) for name in _FIELDS}  # asdict would make deep copies of all values
    reports = cast(list[dict[str, Any]], control.all_gather_object(report))
    proposals = list(map(_proposal, reports))
    # Refusals come first: a rank that refuses the step does not know what the others ask of it, such as a recording.
    _refuse_together(proposals, control)
    require_equal(reports, control.names, RULES, StepRefused)
    for name, use in _USES.items():
        _require_where_taken(proposals, name, use, control.names)
    require_equal_digests([proposal.copies for proposal in proposals], control.names, StepRefused)
    return proposals


_USES = {
    "keywords": ("keyword arguments", "its layers may take them; pass them on every rank"),
    "target": (
        "a target",
        "holds a last stage and so computes losses; pass the target to every rank that holds the last stage of a route",
    ),
}
"""Of each field, its noun in messages, and why a rank that `takes_` it needs it where any rank was given it."""


def _require_where_taken(proposals: Sequence[StepProposal], name: str, use: tuple[str, str], names: RankNames) -> None:
    """Refuse a part of the batch that only some of the ranks got that have a use for it. Raises: StepRefused."""
    ranks_with = [rank for rank, proposal in enumerate(proposals) if getattr(proposal, name) is not None]
    takers = [rank for rank, proposal in enumerate(proposals) if getattr(proposal, f"takes_{name}")]
    rank = next((taker for taker in takers if taker not in ranks_with), None)
    if ranks_with and rank is not None:
        noun, reason = use
        text = f"{names[ranks_with[0]]} was given {noun}, {names[rank]} was not, but {reason}"
        raise StepRefused(text, rank=names.numbers[rank])


def _refuse_together(proposals: Sequence[StepProposal], control: Control) -> None:
    """Refuse the step where a rank does; the end of the data counts before other reasons. Raises: StepRefused."""
    reasons = {rank: (item.refusal, item.is_end_of_data) for rank, item in enumerate(proposals) if item.refusal}
    if reasons:
        error, local_text = refused(reasons, control.names), proposals[control.rank].refusal
        is_local = local_text and not isinstance(error, EndOfData)
        raise StepRefused(local_text, rank=error.rank) if is_local else error


def _proposal(report: Mapping[str, Any]) -> StepProposal:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in report.items()
    }
    return StepProposal(**values | {"mode": Mode(report["mode"]), "extra": Extra(report["extra"])})


def _first_known(views: Sequence[Sequence[int] | None]) -> Sequence[int]:
    return next((view for view in views if view is not None), ())
