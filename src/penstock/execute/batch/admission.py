"""Admits a batch: it is cut, and runs only if all ranks run the same step on the same batch (part 2 of a step)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError, StepRefused, warn
from penstock.execute.batch.local_batch import Batch, BatchCutter, StepRequest, stream_of
from penstock.execute.batch.stream import Stream
from penstock.execute.batch.values import NUM_PARTS, BatchValues, refuse_other_values
from penstock.execute.control.agreement import (
    AgreedStep,
    BatchWeight,
    Mode,
    StepProposal,
    agree_on_step,
    named_ranks,
    refusing,
    require_cut,
)
from penstock.execute.control.collectives import Control
from penstock.execute.control.copy_digests import CopyDigest
from penstock.execute.replicas.agreement import agree_across, refuse_across

VALUES_EVERY = 100
"""The ranks compare the values of the first of so many batches; training steps and evaluations are counted apart."""


@dataclass(slots=True, eq=False)
class Admission:
    """Admits the batches of one rank of a pipeline."""

    control: Control
    cutter: BatchCutter
    checks_values: bool = True
    weigh: Callable[[Batch, AgreedStep], BatchWeight] | None = None
    """Returns the weight of a batch among those of all replicas; None where there is one replica."""
    digest_copies: Callable[[], Sequence[CopyDigest]] = tuple
    """Returns the digests of this rank's copies of tied parameters, which change in training steps."""
    _num_admitted: Counter[bool] = field(default_factory=Counter)
    _has_warned: bool = False

    def admit(
        self, mode: Mode, call: StepRequest, problem: PenstockError | None = None, **proposed: Any
    ) -> tuple[AgreedStep, Batch]:
        """Cut this rank's batch into microbatches, and agree on the step with all other ranks in one small gather.

        Each rank tells the others a `StepProposal`: digests of what it was given, sizes, and the fields `proposed`. A
        `problem` of this rank makes all ranks refuse the step. The result is the agreed step, and this rank's batch
        with the sizes on which the ranks agree.

        Raises:
            StepRefused: on every rank alike, if a batch cannot be cut, a rank has a problem, or the ranks differ.
        """
        # An error here is no reason to raise yet: the other ranks must hear of it, and refuse the step too.
        refusal = problem or call.refusal
        local_batch = Batch()
        stream: Stream | None = None
        output_ranks: Sequence[int] | None = None
        try:
            output_ranks = named_ranks(call.return_outputs, self.control.within.num_ranks)
            stream = stream_of(call)
            if call.refusal is None:
                local_batch = self.cutter.cut(call, mode)
        except PenstockError as error:
            refusal = refusal or error
        values, reader = None, local_batch.reader
        if refusal is None and self.checks_values and self.control.num_ranks > 1:
            data, is_due = local_batch.data, self._is_due(mode) and reader is None
            # Digests of tensors are taken in few steps (`_is_due`), since they cost time; other values in every step.
            values = BatchValues(data.args, data.kwargs, data.target, reads_all=is_due)
        wants_outputs = output_ranks is None and bool(call.return_outputs)
        proposal = StepProposal(
            mode=mode,
            inputs=local_batch.digests[0] or None,
            keywords=local_batch.digests[1] or None,
            target=local_batch.digests[2] or None,
            sizes=_unless_zero([microbatch.size for microbatch in local_batch.microbatches]),
            lengths=_unless_zero(_lengths_of(local_batch)),
            microbatches=local_batch.number,
            first_microbatch=local_batch.first_microbatch,
            uncut_rows=local_batch.uncut_rows,
            takes_keywords=bool(self.cutter.needs.keywords),
            takes_target=self.cutter.needs.target,
            wants_outputs=wants_outputs,
            output_ranks=() if wants_outputs else output_ranks,
            extra=call.extra,
            position=None if reader is None else reader.stream.position,
            values=() if values is None else values.digests(),
            copies=self.digest_copies() if refusal is None and self._compares_copies(mode) else (),
            **({} if refusal is None else refusing(refusal)),
            **proposed,
        )
        try:
            agreed, batch = self._agree(proposal, local_batch, values)
            agreed = self._agree_across(proposal, agreed, batch)
        except StepRefused as error:
            if stream is not None:
                # No rank runs the step, so the next step must begin with the same microbatch of the stream.
                stream.undo_begin()
            if refusal is not None:
                raise error from refusal
            raise
        # A PreSplit that was marked as consumed gives its parts away, so that each is freed after its use; not before
        # all ranks run the step, since the caller may pass a refused batch again.
        for presplit in local_batch.consumed_presplits:
            presplit.parts.clear()
        self._num_admitted[mode.is_training] += 1
        return agreed, batch

    def check_values_again(self) -> None:
        """Compare the values of the next batch, as after a failure, on all ranks alike."""
        self._num_admitted.clear()

    def _agree(self, proposal: StepProposal, batch: Batch, values: BatchValues | None) -> tuple[AgreedStep, Batch]:
        """Agree with the ranks of this replica. Raises: StepRefused."""
        within = self.control.within
        try:
            proposals = agree_on_step(within, proposal)
            digests = [rank_proposal.values or (0,) * NUM_PARTS for rank_proposal in proposals]
            refuse_other_values(within, values, digests)
            agreed = AgreedStep.of(proposals)
            require_cut(proposals, agreed, within.names)
            return agreed, self.cutter.with_agreed_sizes(batch, agreed)
        except StepRefused as error:
            if self.weigh is not None:
                refuse_across(self.control, proposal, error)
            raise

    def _agree_across(self, proposal: StepProposal, agreed: AgreedStep, batch: Batch) -> AgreedStep:
        """Agree with the other replicas, if any. Raises: StepRefused."""
        if self.weigh is None:
            return agreed
        weight = self.weigh(batch, agreed)
        is_due = self._is_due(proposal.mode) and proposal.mode.is_training and batch.reader is None
        job_step = agree_across(self.control, proposal, agreed, weight, proposal.values if is_due else ())
        is_new = job_step.has_equal_batches and not self._has_warned
        if is_new and self.control.rank == 0:
            self._has_warned = True
            warn(
                f"all {self.control.places.num_replicas} replicas were given one and the same batch, so each of its "
                "rows counts several times; give each replica rows of its own, by pipeline.replica"
            )
        return job_step

    def _is_due(self, mode: Mode) -> bool:
        """Whether the values of the next batch are compared."""
        return self._num_admitted[mode.is_training] % VALUES_EVERY == 0

    def _compares_copies(self, mode: Mode) -> bool:
        """Whether copies of tied parameters are compared: in the steps whose batches are, and in the second one.

        Ranks that treat copies differently come to differ with their first optimizer step, which shows there.
        """
        is_due = self._is_due(mode) or self._num_admitted[mode.is_training] == 1
        return self.checks_values and mode.is_training and is_due


def _lengths_of(batch: Batch) -> list[int]:
    """Return the lengths of the slices of one microbatch where all are alike, else of every microbatch.

    A rank without rows of the batch may not know how many microbatches there are.
    """
    lengths = [[part.length for part in slices] for slices in batch.slices]
    are_alike = all(numbers == lengths[0] for numbers in lengths)
    return [number for numbers in (lengths[:1] if are_alike else lengths) for number in numbers]


def _unless_zero(numbers: list[int]) -> list[int] | None:
    return numbers if any(numbers) else None
