"""The gate of a step: splits the batch and lets it in only if all ranks run the same step on the same batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.errors import EndOfData, PenstockError, PipelineError, StepRefused, nearest
from penstock.execute.batch.agreement import (
    Extra,
    Mode,
    Offer,
    agree_on_step,
    agreed_lengths,
    agreed_sizes,
    digest,
    known_to_any,
    signature_of,
    trained_of,
)
from penstock.execute.batch.cutting import BatchRule, with_sizes
from penstock.execute.batch.microbatch import Microbatch, PreSplit
from penstock.execute.batch.stream import Reader, Stream, StreamRules
from penstock.execute.batch.supply import Supply, without_data
from penstock.execute.batch.values import BatchValues
from penstock.execute.stages.signatures import EVERY
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.protocol import Transport
from penstock.execute.values.tree import flatten
from penstock.placement import Placement

VALUES_EVERY = 100
"""The values of the first batch, and of each so many after it, are compared between the ranks; those of training
steps and of evaluations apart."""
NO_MICROBATCH = -1
"""In the place of the rows of a microbatch that an evaluation of few rows does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch that all ranks agreed on."""

    microbatches: list[Microbatch]
    """With the parts of the batch that this rank was given, and the sizes that hold for all."""
    slices: list[list[Microbatch]]
    """Per microbatch its slices; the microbatch itself where it is not cut."""
    signature: str
    """Equal signatures mean equal shapes on every stage, and gradients for the same tensors."""
    wanting_outputs: frozenset[int]
    """The ranks that asked for outputs."""
    has_target: bool = False
    """Whether this rank was given a target."""
    supply: Supply | None = None
    """Of data that are pulled when needed, or let go after their use: it fills and empties `slices`."""
    trained: int = 0
    """Stands for which parameters of all ranks need gradients."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What a rank's stages take of a batch."""

    inputs: bool
    target: bool
    keywords: frozenset[str] = frozenset()
    keywords_of_all: frozenset[str] | None = None
    """What the layers of any rank take, `EVERY` among them if one may take any; None: not known."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """Passed as the target: this rank cannot run the step, so all ranks refuse it and are told why."""

    error: PenstockError


@dataclass(slots=True, eq=False)
class _Given:
    """What a rank was given, before the ranks have agreed on it; digests are 0 for nothing."""

    microbatches: list[Microbatch] = field(default_factory=list)
    slices: list[list[Microbatch]] = field(default_factory=list)
    inputs: int = 0
    keywords: int = 0
    target: int = 0
    position: int = 0
    reader: Reader | None = None
    call: Call = Call()
    """Of a stream, the first microbatch."""
    spent: list[PreSplit] = field(default_factory=list)
    """What lets go of its parts when they have been used."""


class Gate:
    """Admits the batches of one rank of a pipeline; times are read off `read`."""

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        rule: BatchRule,
        wants: Wants,
        *,
        stream_rules: StreamRules = StreamRules(),  # noqa: B008 (it cannot change)
        checks_values: bool = True,
        read: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._device = device
        self._rule = rule
        self._wants = wants
        self._stream_rules = stream_rules
        self._checks_values = checks_values and transport.num_ranks > 1
        self._num_admitted = {True: 0, False: 0}
        self._read = read

    def admit(
        self,
        mode: Mode,
        call: Call,
        *,
        step_number: int = 0,
        trained: int = 0,
        extra: Extra = Extra.NOTHING,
        scale: float = 0.0,
        problem: PenstockError | None = None,
    ) -> Batch:
        """Split the batch and compare it with what the other ranks were given; one small collective.

        `step_number` is what the step draws its random numbers by, 0 where it draws none; `trained` stands for which of
        this rank's parameters need gradients, 0 where none is to get one. `extra` is what else it was asked for.
        `scale` is that of the rank's GradScaler, 0 where it has none. A `problem` of this rank refuses the step too.

        Raises:
            StepRefused: on every rank alike, if a batch cannot be split, a rank has a problem, or the ranks differ.
        """
        refusal = problem
        given = _Given()
        stream: Stream | None = None
        try:
            stream = _stream_of(call)
            given = self._whole(call, mode) if stream is None else self._streamed(stream)
        except PenstockError as error:
            refusal = refusal or error
        try:
            offer = self._offer(mode, call, given, refusal)
            offer = replace(offer, step_number=step_number, trained=trained, extra=extra, scale=scale)
            values = self._values(mode, given) if refusal is None else None
            offers = agree_on_step(self._transport, offer, self._device, values)
            if any(offer.is_refused for offer in offers):
                self._refuse_together(refusal)
            batch = self._agreed(given, offers)
            self._num_admitted[mode.is_training] += 1
            return batch
        except StepRefused:
            if stream is not None:
                stream.undo_begin()
            raise

    def check_values_again(self) -> None:
        """Compare the values of the next batch, as after a failure, on all ranks alike."""
        self._num_admitted = {True: 0, False: 0}

    def _values(self, mode: Mode, given: _Given) -> BatchValues | None:
        """What the ranks compare beside shapes; tensors only now and then, so that it costs nothing to speak of."""
        if not self._checks_values:
            return None
        is_due = self._num_admitted[mode.is_training] % VALUES_EVERY == 0 and given.reader is None
        call = given.call
        return BatchValues(call.args, call.kwargs, call.target, reads_all=is_due)

    def _whole(self, call: Call, mode: Mode) -> _Given:
        if isinstance(call.target, Refusal):
            raise call.target.error
        self._check(call)
        rule = replace(self._rule, takes_any_size=not mode.is_training)
        microbatches = rule.microbatches(call.args, call.kwargs, call.target)
        return _Given(
            microbatches,
            [self._rule.slices(microbatch) for microbatch in microbatches],
            digest(self._rule.signature(call.args, {}, None)) if call.args else 0,
            digest(self._rule.signature((), call.kwargs, None)) if call.kwargs else 0,
            digest(self._rule.signature((), {}, call.target)) if call.target is not None else 0,
            call=call,
            spent=[each for each in flatten((call.args, dict(call.kwargs), call.target))[0] if _is_spent(each)],
        )

    def _streamed(self, stream: Stream) -> _Given:
        """Look at the first microbatch only: the others are to be like it."""
        num_microbatches = self._rule.num_microbatches
        if not (self._wants.inputs or self._wants.target or self._wants.keywords):
            return self._whole(Call(), Mode.TRAIN)
        reader = Reader(stream, self._transport.rank, self._rule, self._stream_rules, read=self._read)
        part, slices = reader.begin()
        first = Call(part.args, part.kwargs, part.target)
        self._check(first)
        rule = replace(self._rule, num_microbatches=1)
        kind = f"{num_microbatches} off a stream"
        empty_slices = [without_data(one) for one in slices]
        return _Given(
            [replace(empty_slices[0], index=index, length=0) for index in range(num_microbatches)],
            [[replace(one, index=index) for one in empty_slices] for index in range(num_microbatches)],
            digest(f"{kind} {rule.signature(part.args, {}, None)}") if part.args else 0,
            digest(f"{kind} {rule.signature((), part.kwargs, None)}") if part.kwargs else 0,
            digest(f"{kind} {rule.signature((), {}, part.target)}") if part.target is not None else 0,
            stream.position + 1,
            reader,
            first,
        )

    def _offer(self, mode: Mode, call: Call, given: _Given, refusal: PenstockError | None) -> Offer:
        num_microbatches, num_slices = self._rule.num_microbatches, self._rule.num_slices
        return Offer(
            mode,
            given.inputs,
            given.target,
            refusal is not None,
            _filled([microbatch.size for microbatch in given.microbatches], num_microbatches, NO_MICROBATCH),
            given.keywords,
            bool(self._wants.keywords),
            self._wants.target,
            call.return_outputs,
            _filled([each.length for row in given.slices for each in row], num_microbatches * num_slices, 0),
            given.position,
        )

    def _agreed(self, given: _Given, offers: Sequence[Offer]) -> Batch:
        rows, lengths, width = agreed_sizes(offers), agreed_lengths(offers), self._rule.num_slices
        num_microbatches = sum(size != NO_MICROBATCH for size in rows)
        if width > 1 and not any(lengths):
            raise StepRefused(
                f"nothing in the batch has a dimension {self._rule.slice_dim} to cut into {width} slices; give "
                "slice_dim the dimension of the sequence, or use a schedule with 1 slice"
            )
        sized = [
            part if part.size == rows[part.index] else replace(part, size=rows[part.index])
            for part in given.microbatches[:num_microbatches]
        ]
        parts = [
            with_sizes(slices, rows[index], lengths[index * width : (index + 1) * width])
            for index, slices in enumerate(given.slices[:num_microbatches])
        ]
        for presplit in given.spent:
            presplit.parts.clear()
        wanting = frozenset(rank for rank, offer in enumerate(offers) if offer.wants_outputs)
        supply = Supply(parts, given.reader) if given.reader is not None or given.spent else None
        return Batch(
            sized, parts, signature_of(offers), wanting, bool(given.target), supply, trained=trained_of(offers)
        )

    def _check(self, call: Call) -> None:
        if self._wants.inputs and not (call.args or call.kwargs):
            raise PipelineError(
                f"rank {self._transport.rank} holds the first stage and was given no inputs; pass it the batch"
            )
        known = self._wants.keywords_of_all
        for name in call.kwargs:
            if known is not None and name not in known and EVERY not in known:
                raise PipelineError(
                    f"no layer's forward names {name!r}.{nearest(name, known)} The layers take the "
                    f"keywords {sorted(known)}; rename or drop it"
                )

    def _refuse_together(self, refusal: PenstockError | None) -> None:
        own = "" if refusal is None else str(refusal)
        ends = self._transport.all_gather_object(own if isinstance(refusal, EndOfData) else "")
        texts = self._transport.all_gather_object(own)
        for rank, text in enumerate(ends):
            if text:
                raise EndOfData(str(text), rank=rank) from refusal
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        if refusal is not None:
            raise StepRefused(own, rank=rank) from refusal
        raise StepRefused(f"rank {rank} refuses the step: {text}", rank=rank)


def _filled(sizes: Sequence[int], number: int, absent: int) -> tuple[int, ...]:
    """As many sizes as a row of the agreement has; all are 0 where a rank was refused its batch."""
    return (*sizes, *[absent if sizes else 0] * (number - len(sizes)))


def _stream_of(call: Call) -> Stream | None:
    """The stream that brings the whole batch, if one does."""
    if not any(isinstance(each, Stream) for each in (*call.args, *call.kwargs.values(), call.target)):
        return None
    stream = call.args[0] if call.args else None
    if isinstance(stream, Stream) and len(call.args) == 1 and not call.kwargs and call.target is None:
        return stream
    raise PipelineError(
        "a Stream brings inputs, keywords and target of each microbatch itself; pass it alone, as in step(stream)"
    )


def _is_spent(value: object) -> bool:
    return isinstance(value, PreSplit) and value.is_spent
