"""The gate of a step: splits the batch and lets it in only if all ranks run the same step on the same batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.errors import PenstockError, PipelineError, StepRefused, nearest
from penstock.execute.agreement import (
    Mode,
    Offer,
    agree_on_step,
    agreed_lengths,
    agreed_sizes,
    digest,
    known_to_any,
    signature_of,
)
from penstock.execute.microbatch import Microbatch
from penstock.execute.slices import BatchRule, with_sizes
from penstock.execute.stage import Stage
from penstock.execute.transport.protocol import Transport
from penstock.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch that all ranks agreed on."""

    microbatches: list[Microbatch]
    """With the parts of the batch that this rank was given, and the sizes that hold for all."""
    slices: list[list[Microbatch]]
    """Per microbatch its slices; the microbatch itself where it is not cut."""
    signature: str
    """Equal signatures mean equal shapes on every stage."""
    wanting_outputs: frozenset[int]
    """The ranks that asked for outputs."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What a rank's stages take of a batch."""

    inputs: bool
    target: bool
    keywords: frozenset[str] = frozenset()
    keywords_of_all: frozenset[str] | None = None
    """What the layers of any rank take; None: not known."""


def wants_of(stages: Sequence[Stage], placement: Placement, transport: Transport, *, has_loss: bool) -> Wants:
    """Find out what the stages of this rank take, and which keywords those of all ranks do; a collective."""
    keywords = frozenset(name for stage in stages for name in stage.keyword_names())
    return Wants(
        inputs=any(placement.previous_stage[stage.index] < 0 for stage in stages),
        target=has_loss,
        keywords=keywords,
        keywords_of_all=known_to_any(transport, keywords),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What `step` or `evaluate` was called with on this rank."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    return_outputs: bool = False
    record: bool = False


class Gate:
    """Admits the batches of one rank of a pipeline."""

    def __init__(self, transport: Transport, device: torch.device, rule: BatchRule, wants: Wants) -> None:
        self._transport = transport
        self._device = device
        self._rule = rule
        self._wants = wants

    def admit(self, mode: Mode, call: Call) -> Batch:
        """Split the batch and compare it with what the other ranks were given; one small collective.

        Raises:
            StepRefused: on every rank alike, if any rank's batch cannot be split or the ranks differ.
        """
        refusal: PenstockError | None = None
        microbatches: list[Microbatch] = []
        slices: list[list[Microbatch]] = []
        inputs = keywords = labels = 0
        try:
            self._check(call)
            microbatches = self._rule.microbatches(call.args, call.kwargs, call.target)
            slices = [self._rule.slices(microbatch) for microbatch in microbatches]
            inputs = digest(self._rule.signature(call.args, {}, None)) if call.args else 0
            keywords = digest(self._rule.signature((), call.kwargs, None)) if call.kwargs else 0
            labels = digest(self._rule.signature((), {}, call.target)) if call.target is not None else 0
        except PenstockError as error:
            refusal = error
        num_microbatches, num_slices = self._rule.num_microbatches, self._rule.num_slices
        mine = Offer(
            mode,
            inputs,
            labels,
            refusal is not None,
            tuple(microbatch.size for microbatch in microbatches) or (0,) * num_microbatches,
            keywords,
            bool(self._wants.keywords),
            self._wants.target,
            call.return_outputs,
            tuple(each.length for row in slices for each in row) or (0,) * (num_microbatches * num_slices),
        )
        offers = agree_on_step(self._transport, mine, self._device)
        if any(offer.is_refused for offer in offers):
            self._refuse_together(refusal)
        return self._agreed(microbatches, slices, offers)

    def _agreed(
        self, microbatches: Sequence[Microbatch], slices: Sequence[Sequence[Microbatch]], offers: Sequence[Offer]
    ) -> Batch:
        rows, lengths, width = agreed_sizes(offers), agreed_lengths(offers), self._rule.num_slices
        if width > 1 and not any(lengths):
            raise StepRefused(
                f"nothing in the batch has a dimension {self._rule.slice_dim} to cut into {width} slices; give "
                "slice_dim the dimension of the sequence, or use a schedule with 1 slice"
            )
        sized = [replace(each, size=rows[each.index]) for each in microbatches]
        parts = [
            with_sizes(each, rows[index], lengths[index * width : (index + 1) * width])
            for index, each in enumerate(slices)
        ]
        wanting = frozenset(rank for rank, offer in enumerate(offers) if offer.wants_outputs)
        return Batch(sized, parts, signature_of(offers), wanting)

    def _check(self, call: Call) -> None:
        if self._wants.inputs and not (call.args or call.kwargs):
            raise PipelineError(
                f"rank {self._transport.rank} holds the first stage and was given no inputs; pass it the batch"
            )
        known = self._wants.keywords_of_all
        for name in call.kwargs:
            if known is not None and name not in known:
                raise PipelineError(
                    f"no layer's forward names {name!r}.{nearest(name, known)} The layers take the "
                    f"keywords {sorted(known)}; rename or drop it"
                )

    def _refuse_together(self, refusal: PenstockError | None) -> None:
        texts = self._transport.all_gather_object("" if refusal is None else str(refusal))
        if refusal is not None:
            raise StepRefused(str(refusal), rank=self._transport.rank) from refusal
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise StepRefused(f"rank {rank} refuses its batch: {text}", rank=rank)
