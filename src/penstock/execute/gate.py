"""The gate of a step: splits the batch and lets it in only if all ranks run the same step on the same batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.errors import PenstockError, PipelineError, StepRefused, nearest
from penstock.execute.agreement import Mode, Offer, agree_on_step, agreed_sizes, digest, signature_of
from penstock.execute.microbatch import BatchSpec, Microbatch, batch_signature, split_batch
from penstock.execute.transport.protocol import Transport


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch that all ranks agreed on."""

    microbatches: list[Microbatch]
    """With the parts of the batch that this rank was given, and the sizes that hold for all."""
    signature: str
    """Equal signatures mean equal shapes on every stage."""


class Gate:
    """Admits the batches of one rank of a pipeline."""

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        *,
        num_microbatches: int,
        specs: BatchSpec | None,
        allow_ragged: bool,
        needs_inputs: bool,
        own_keywords: frozenset[str] = frozenset(),
        known_keywords: frozenset[str] | None = None,
    ) -> None:
        self._transport = transport
        self._device = device
        self._num_microbatches = num_microbatches
        self._specs = specs
        self._allow_ragged = allow_ragged
        self._needs_inputs = needs_inputs
        self._own_keywords = own_keywords
        self._known_keywords = known_keywords

    def admit(self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Batch:
        """Split the batch and compare it with what the other ranks were given; one small collective.

        Raises:
            StepRefused: on every rank alike, if any rank's batch cannot be split or the ranks differ.
        """
        refusal: PenstockError | None = None
        microbatches: list[Microbatch] = []
        inputs = keywords = labels = 0
        try:
            microbatches = self._split(args, kwargs, target)
            inputs = self._digest(args, {}, None) if args else 0
            keywords = self._digest((), kwargs, None) if kwargs else 0
            labels = self._digest((), {}, target) if target is not None else 0
        except PenstockError as error:
            refusal = error
        sizes = tuple(microbatch.size for microbatch in microbatches) or (0,) * self._num_microbatches
        mine = Offer(mode, inputs, labels, refusal is not None, sizes, keywords, bool(self._own_keywords))
        offers = agree_on_step(self._transport, mine, self._device)
        if any(offer.is_refused for offer in offers):
            self._refuse_together(refusal)
        rows = agreed_sizes(offers)
        return Batch([replace(each, size=rows[each.index]) for each in microbatches], signature_of(offers))

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> list[Microbatch]:
        if self._needs_inputs and not (args or kwargs):
            raise PipelineError(
                f"rank {self._transport.rank} holds the first stage and was given no inputs; pass it the batch"
            )
        for name in kwargs:
            if self._known_keywords is not None and name not in self._known_keywords:
                raise PipelineError(
                    f"no layer's forward names {name!r}.{nearest(name, self._known_keywords)} The layers take the "
                    f"keywords {sorted(self._known_keywords)}; rename or drop it"
                )
        return split_batch(
            args,
            kwargs,
            target,
            num_microbatches=self._num_microbatches,
            specs=self._specs,
            allow_ragged=self._allow_ragged,
        )

    def _digest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> int:
        text = batch_signature(
            args,
            kwargs,
            target,
            num_microbatches=self._num_microbatches,
            specs=self._specs,
            allow_ragged=self._allow_ragged,
        )
        return digest(text)

    def _refuse_together(self, refusal: PenstockError | None) -> None:
        texts = self._transport.all_gather_object("" if refusal is None else str(refusal))
        if refusal is not None:
            raise StepRefused(str(refusal), rank=self._transport.rank) from refusal
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise StepRefused(f"rank {rank} refuses its batch: {text}", rank=rank)
