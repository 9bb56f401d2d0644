"""What ranks make sure of together: that they were set up alike, and that they run the same step on the same batch."""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from penstock.errors import PipelineError, StepRefused
from penstock.execute.batch.values import NUM_PARTS, BatchValues, refuse_other_values
from penstock.execute.transport.protocol import Transport

_NUM_FIELDS = 13
_DIGEST_BYTES = 7
"""Fits a signed 64-bit integer and leaves 0 for "nothing given"."""


class Mode(IntEnum):
    """What a rank was asked to run."""

    TRAIN = 1
    EVALUATE = 2
    TRAIN_SPLIT = 3
    """Train with every backward in two parts, to measure them."""

    @property
    def is_training(self) -> bool:
        return self is not Mode.EVALUATE


class Extra(IntEnum):
    """What a rank was asked to find out about a step; all ranks gather it together when the step is over."""

    NOTHING = 0
    RECORDING = 1
    MEMORY = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's view of the step that begins; a digest of 0 means that the rank was given nothing."""

    mode: Mode
    inputs: int
    target: int
    is_refused: bool
    sizes: tuple[int, ...]
    """Rows of each microbatch; zeros where the rank was given nothing to split."""
    keywords: int = 0
    takes_keywords: bool = False
    """Whether the rank has layers that a keyword argument can reach."""
    takes_target: bool = False
    """Whether the rank computes losses."""
    wants_outputs: bool = False
    lengths: tuple[int, ...] = ()
    """Per slice of each microbatch, its length; zeros where the rank was given nothing to cut."""
    position: int = 0
    """Where a rank's stream stands, counted from 1; 0 where it has none."""
    step_number: int = 0
    """What the step draws its random numbers by; 0 where it draws none."""
    trained: int = 0
    """Stands for which of the rank's parameters need gradients; 0 where none is to get one."""
    extra: Extra = Extra.NOTHING
    scale: float = 0.0
    """The scale of the rank's GradScaler; 0 where it has none."""


def digest(text: str) -> int:
    """Return a positive number that stands for the text on all ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big") | 1


def agree_on_setup(transport: Transport, fields: Mapping[str, str]) -> None:
    """Compare how all ranks were set up.

    Raises:
        PipelineError: naming the ranks and the field that differ; the same on every rank.
    """
    everyone = transport.all_gather_object(dict(fields))
    for name in fields:
        values = [str(theirs.get(name)) if isinstance(theirs, dict) else "nothing" for theirs in everyone]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise PipelineError(
                f"the ranks disagree on {name}: rank 0 has {values[0]}, rank {odd[0]} has {values[odd[0]]}"
                f"{_and_others(odd)}. Start every rank with the same arguments and the same version",
                rank=odd[0],
            )


def agree_on_step(
    transport: Transport, mine: Offer, device: torch.device, values: BatchValues | None = None
) -> list[Offer]:
    """Exchange what every rank is about to run, and the digests of `values` if any; one small collective.

    Raises:
        StepRefused: if the ranks run different things; the same on every rank, and nothing has been sent yet.
    """
    row = _row(mine)
    table = torch.zeros(transport.num_ranks, len(row) + NUM_PARTS, dtype=torch.int64, device=device)
    table[transport.rank, : len(row)] = torch.tensor(row)
    if values is not None:
        table[transport.rank, len(row) :] = values.digests(device)
    transport.all_reduce(table)
    rows = table.tolist()
    offers = [_offer(theirs[: len(row)], len(mine.sizes)) for theirs in rows]
    modes = [offer.mode for offer in offers]
    if len(set(modes)) > 1:
        odd = next(rank for rank, mode in enumerate(modes) if mode != modes[0])
        raise StepRefused(
            f"rank 0 runs {_verb(modes[0])}, rank {odd} runs {_verb(modes[odd])}; call the same on every rank", rank=odd
        )
    _require_one_extra([offer.extra for offer in offers])
    _require_one_draw([offer.step_number for offer in offers])
    _require_one_scale([offer.scale for offer in offers])
    _require_one([offer.inputs for offer in offers], "inputs")
    _require_one([offer.keywords for offer in offers], "keyword arguments")
    _require_keywords(offers)
    _require_streams_in_step(offers)
    _require_one([offer.target for offer in offers], "a target")
    _require_target(offers)
    _require_one([offer.sizes if any(offer.sizes) else () for offer in offers], "microbatches")
    _require_one([offer.lengths if any(offer.lengths) else () for offer in offers], "slices")
    if not any(offer.is_refused for offer in offers):
        refuse_other_values(transport, values, [theirs[len(row) :] for theirs in rows])
    return offers


def known_to_any(transport: Transport, names: Iterable[str]) -> frozenset[str]:
    """Return the names that any rank brings; a collective."""
    everyone = transport.all_gather_object(sorted(names))
    return frozenset(str(name) for theirs in everyone if isinstance(theirs, list) for name in theirs)


def agreed_sizes(offers: Sequence[Offer]) -> tuple[int, ...]:
    """Rows of each microbatch, from whichever rank knows them; zeros if none does."""
    return next((offer.sizes for offer in offers if any(offer.sizes)), offers[0].sizes)


def agreed_lengths(offers: Sequence[Offer]) -> tuple[int, ...]:
    """Lengths of the slices, from whichever rank knows them; zeros if none does."""
    return next((offer.lengths for offer in offers if any(offer.lengths)), offers[0].lengths)


def signature_of(offers: Sequence[Offer]) -> str:
    """What all ranks know of the batch: equal signatures mean equal shapes on every stage."""
    inputs = max(offer.inputs for offer in offers)
    keywords = max(offer.keywords for offer in offers)
    target = max(offer.target for offer in offers)
    return f"{offers[0].mode.name} {inputs} {keywords} {target} {trained_of(offers)}"


def trained_of(offers: Sequence[Offer]) -> int:
    """Return what stands for all parameters of all ranks that need gradients; 0 where none is to get one."""
    return digest(str([offer.trained for offer in offers])) if any(offer.trained for offer in offers) else 0


def _row(offer: Offer) -> list[int]:
    flags = (offer.takes_keywords, offer.takes_target, offer.wants_outputs)
    (scale,) = struct.unpack("<q", struct.pack("<d", offer.scale))  # all its bits
    places = (offer.position, offer.step_number, offer.trained, offer.extra, scale)
    fields = [offer.mode, offer.inputs, offer.target, offer.is_refused, offer.keywords, *places, *flags]
    return [*map(int, fields), *offer.sizes, *offer.lengths]


def _offer(row: Sequence[int], num_sizes: int) -> Offer:
    mode, inputs, target, is_refused, keywords, position, step_number, trained, extra, scale, *flags = row[:_NUM_FIELDS]
    takes_keywords, takes_target, wants_outputs = map(bool, flags)
    end = _NUM_FIELDS + num_sizes
    sizes, lengths = tuple(row[_NUM_FIELDS:end]), tuple(row[end:])
    return Offer(
        Mode(mode),
        inputs,
        target,
        bool(is_refused),
        sizes,
        keywords,
        takes_keywords,
        takes_target,
        wants_outputs,
        lengths,
        position,
        step_number,
        trained,
        Extra(extra),
        *struct.unpack("<d", struct.pack("<q", scale)),
    )


def _require_one_extra(extras: Sequence[Extra]) -> None:
    """Refuse a step after which only some ranks would wait for what the others have to give."""
    for rank, extra in enumerate(extras):
        if extra is not extras[0]:
            raise StepRefused(
                f"rank 0 was asked for {_asked(extras[0])} in this step, rank {rank} for {_asked(extra)}; "
                "ask for the same on every rank",
                rank=rank,
            )


def _require_one_draw(step_numbers: Sequence[int]) -> None:
    """Refuse a step whose ranks would draw different random numbers."""
    for rank, number in enumerate(step_numbers):
        if number != step_numbers[0]:
            raise StepRefused(
                f"rank 0 is at step_number {step_numbers[0]}, rank {rank} at {number}, but with a seed random numbers "
                "go by it; set pipeline.step_number alike on all ranks, to the training steps that the run has had",
                rank=rank,
            )


def _require_one_scale(scales: Sequence[float]) -> None:
    """Refuse a step whose gradients some ranks would unscale by another number than its losses are scaled by."""
    for rank, scale in enumerate(scales):
        if scale != scales[0]:
            raise StepRefused(
                f"the GradScaler of rank 0 has the scale {scales[0]:g}, that of rank {rank} has {scale:g}; call its "
                "update() on every rank after each optimizer step, and change or load its state on all ranks alike",
                rank=rank,
            )


def _require_target(offers: Sequence[Offer]) -> None:
    """Refuse a target that only some of the ranks got that compute losses: the others' would differ in kind."""
    given = [rank for rank, offer in enumerate(offers) if offer.target]
    lacking = [rank for rank, offer in enumerate(offers) if offer.takes_target and not offer.target]
    if given and lacking and not any(offer.is_refused for offer in offers):
        raise StepRefused(
            f"rank {given[0]} was given a target, rank {lacking[0]} was not, but holds a last stage and so computes "
            "losses; pass the target to every rank that holds the last stage of a route",
            rank=lacking[0],
        )


def _require_keywords(offers: Sequence[Offer]) -> None:
    """Refuse keyword arguments that only some of the ranks got whose layers may name them: the others would run on
    their layers' defaults."""
    given = [rank for rank, offer in enumerate(offers) if offer.keywords]
    lacking = [rank for rank, offer in enumerate(offers) if offer.takes_keywords and not offer.keywords]
    if given and lacking and not any(offer.is_refused for offer in offers):
        raise StepRefused(
            f"rank {given[0]} was given keyword arguments, rank {lacking[0]} was not, but its layers may take them; "
            "pass them on every rank",
            rank=lacking[0],
        )


def _require_streams_in_step(offers: Sequence[Offer]) -> None:
    """Refuse streams of which one is ahead: their ranks would put inputs and targets of different samples together."""
    given = [(rank, offer.position) for rank, offer in enumerate(offers) if offer.position]
    for rank, position in given:
        if position != given[0][1]:
            raise StepRefused(
                f"the stream of rank {given[0][0]} is at microbatch {given[0][1] - 1}, that of rank {rank} at "
                f"{position - 1}; pass new streams over the same data on all ranks",
                rank=rank,
            )


def _require_one(views: Sequence[object], what: str) -> None:
    given = [(rank, value) for rank, value in enumerate(views) if value]
    for rank, value in given:
        if value != given[0][1]:
            raise StepRefused(
                f"rank {given[0][0]} and rank {rank} were given {what} of different shape or type; "
                "pass the same batch on every rank, or nothing where a rank needs none",
                rank=rank,
            )


def _verb(mode: Mode) -> str:
    return {Mode.TRAIN: "step", Mode.EVALUATE: "evaluate", Mode.TRAIN_SPLIT: "a step with split backwards"}[mode]


def _asked(extra: Extra) -> str:
    return {
        Extra.NOTHING: "nothing besides",
        Extra.RECORDING: "a recording (record=True, profile)",
        Extra.MEMORY: "a memory report (memory_report)",
    }[extra]


def _and_others(odd: Sequence[int]) -> str:
    return f" (and so do ranks {', '.join(map(str, odd[1:]))})" if len(odd) > 1 else ""
