"""Cuts a batch as one rank is given it: into microbatches and slices, each checked and described (part 2 of a step)."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from penstock.errors import PenstockError, PipelineError, StepRefused
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.host_to_device import HostToDevice, pinned_or_copied
from penstock.execute.batch.microbatch import Microbatch, PreSplit, sized, without_data
from penstock.execute.batch.needs import InputNeeds
from penstock.execute.batch.prefetcher import Prefetcher
from penstock.execute.batch.preprocessing import StreamContext
from penstock.execute.batch.reader import Reader, StreamRules
from penstock.execute.batch.step_numbers import required_number
from penstock.execute.batch.stream import Part, Stream
from penstock.execute.control.agreement import AgreedStep, Extra, Mode, digest
from penstock.execute.values.tree import flatten


@dataclass(frozen=True, slots=True, eq=False)
class StepRequest:
    """The arguments of `step` or `evaluate` on this rank."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    return_outputs: bool | Collection[int] = False
    """Whether the outputs shall stay where they are made, or the ranks to which they shall go."""
    extra: Extra = Extra.NOTHING
    microbatches: int | None = None
    """Number of microbatches into which the batch is cut; by default the number of the pipeline, or of its stream."""
    refusal: PenstockError | None = None
    """Why this rank cannot run the step; then all ranks refuse it and are told."""


Digests = tuple[int, int, int]
"""Digests of the layouts of inputs, keyword arguments and target; 0 for what was not given."""
MAX_LAYOUTS = 256
"""Number of batch layouts whose first microbatches are remembered."""
_Part = TypeVar("_Part", StepRequest, Microbatch)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The cut batch of this rank; its sizes are those that hold for all ranks once they have agreed on it."""

    microbatches: list[Microbatch] = field(default_factory=list)
    """Microbatches with the parts of the batch that this rank was given."""
    slices: list[list[Microbatch]] = field(default_factory=list)
    """Slices of each microbatch; the microbatch itself where it is not cut."""
    digests: Digests = (0, 0, 0)
    first_microbatch: Digests = (0, 0, 0)
    """Digests of the layouts of these parts of the first microbatch; 0 also where others may be of another layout."""
    uncut_rows: Sequence[tuple[int, str]] = ()
    """Pairs (rows, why a batch of so many is refused), where nothing tells the rows of the batch here."""
    reader: Reader | None = None
    """Reader of a stream, at its first microbatch; None where the batch is no stream."""
    number: int | str | None = None
    """Number by which the batch was cut, or what it follows from; None where the rank was given nothing."""
    data: StepRequest = StepRequest()
    """The arguments that this rank was given; of a stream, its first microbatch."""
    consumed_presplits: Sequence[PreSplit] = ()
    """Values whose parts are released when they have been used."""
    prefetcher: Prefetcher | None = None
    """Fills and empties `slices`, where data are pulled when needed, copied to the device, or let go after use."""

    @property
    def has_target(self) -> bool:
        """Whether this rank was given a target."""
        return self.digests[2] > 0


@dataclass(slots=True, eq=False)
class BatchCutter:
    """Cuts the batches of one rank of a pipeline."""

    rank: int
    """Index of the rank in the pipeline."""
    name: str
    """Name of the rank in messages."""
    rule: BatchRule
    needs: InputNeeds
    stream_rules: StreamRules = field(default_factory=StreamRules)
    copies: HostToDevice | None = None
    """Copies what a batch has in the memory of the host; None where the stages compute there."""
    read: Callable[[], float] = time.monotonic
    """The clock that times waits for data."""
    num_steps: Callable[[], int] = lambda: 0
    """Returns the number of training steps that have succeeded."""
    require_program: Callable[[Mode, int], object] = lambda mode, num_microbatches: None
    """Raises a PenstockError where a mode has no program for a number of microbatches."""
    _first_microbatches: dict[tuple[bool, Digests], Digests] = field(default_factory=dict)
    """Digests of first microbatches, by whether the step trains and the digests of the batch."""

    def cut(self, call: StepRequest, mode: Mode) -> Batch:
        """Return the cut batch of this rank; of a stream, its first microbatch.

        Raises:
            PenstockError: it is not what the layers take, or cannot be cut.
        """
        stream, number = stream_of(call), call.microbatches
        takes_stream = stream is not None and (self.needs.inputs or self.needs.target or bool(self.needs.keywords))
        if stream is not None and takes_stream:
            number = stream.number_of_step(number)
        rule = self.rule
        if number is not None:
            number = required_number(number, "microbatches")
            rule = replace(rule, num_microbatches=number, microbatch_size=None)
        if stream is not None and takes_stream:
            return self._batch_of_stream(stream, mode, rule)
        return self._cut_batch(call if stream is None else StepRequest(microbatches=number), mode, rule)

    def with_agreed_sizes(self, local_batch: Batch, agreed: AgreedStep) -> Batch:
        """Return a batch with the rows and slice lengths that some rank knows, and what brings its data in time."""
        width = self.rule.num_slices
        rows = agreed.sizes or (0,) * (agreed.asked_microbatches or self.rule.num_microbatches)
        lengths = agreed.lengths or (0,) * width
        if len(lengths) == width:
            lengths = tuple(lengths) * len(rows)
        if width > 1 and not any(lengths):
            raise StepRefused(
                f"nothing in the batch has a dimension {self.rule.slice_dim} to cut into {width} slices; give "
                "slice_dim the dimension of the sequence, or use a schedule with 1 slice"
            )
        # An evaluation of few rows has fewer microbatches. A rank that was given nothing hears of their number here;
        # so does one without rows where it follows from their size: what it was given goes to every microbatch.
        local_batch = _with_microbatches(local_batch, len(rows))
        microbatches = [sized(part, rows[part.index], part.length) for part in local_batch.microbatches[: len(rows)]]
        slices = [
            [sized(part, rows[part.index], lengths[part.index * width + part.slice]) for part in parts]
            for parts in local_batch.slices[: len(rows)]
        ]
        prefetcher = None
        if local_batch.reader is not None:
            prefetcher = Prefetcher(slices, local_batch.reader, copies=self.copies)
        elif any(map(self.needs.on_host, microbatches)):
            prefetcher = Prefetcher(slices, microbatches=microbatches, copies=self.copies)
        elif local_batch.consumed_presplits:
            prefetcher = Prefetcher(slices)
        return replace(local_batch, microbatches=microbatches, slices=slices, prefetcher=prefetcher)

    def end_copies(self, *, has_failed: bool = False) -> None:
        """Wait until nothing is copied from the batch of a step any more, as `HostToDevice.end` does."""
        if self.copies is not None:
            self.copies.end(has_failed=has_failed)

    def _cut_batch(self, call: StepRequest, mode: Mode, own_rule: BatchRule) -> Batch:
        self._check_arguments(call)
        form = self._form(call)
        rule = own_rule if mode.is_training else replace(own_rule, takes_any_size=True)
        # The batch is cut as it was passed, which is how specs name its parts, and its parts are bound then.
        microbatches = list(map(self._bind, rule.microbatches(call.args, call.kwargs, call.target)))
        # After the cut, which refuses more microbatches than rows: a program of a million of them takes long to plan.
        self.require_program(mode, len(microbatches))
        values = flatten((call.args, dict(call.kwargs), call.target))[0]
        data, has_rows = self._bind(call), any(microbatch.size for microbatch in microbatches)
        digests = _digests(own_rule, data, form)
        key = mode.is_training, digests
        first_microbatch = self._first_microbatches.get(key)
        if first_microbatch is None:
            # The layout of the batch says that of its first microbatch, so this is for new layouts alone. The parts of
            # a PreSplit may be of a layout each.
            tells_others = not any(isinstance(value, PreSplit) for value in values)
            first_microbatch = _digests(_one_of(own_rule), microbatches[0], form) if tells_others else (0, 0, 0)
            self._first_microbatches[key] = first_microbatch
            if len(self._first_microbatches) > MAX_LAYOUTS:
                del self._first_microbatches[next(iter(self._first_microbatches))]
        return Batch(
            microbatches,
            list(map(self.rule.slices, microbatches)),
            digests,
            first_microbatch,
            () if has_rows else list(rule.uncut_rows(call.args, call.kwargs, call.target).items()),
            number=_number_of(call, own_rule),
            data=data,
            consumed_presplits=[value for value in values if isinstance(value, PreSplit) and value.is_consumed],
        )

    def _form(self, call: StepRequest) -> str:
        """Return how a batch that is bound was passed, where specs go by that; ranks that differ cut it differently.

        Raises:
            PipelineError: specs name arguments by position, and all are passed by name, or the other way round.
        """
        specs, binding = self.rule.specs, self.needs.binding
        is_marked = specs is not None and (specs.args is not None or specs.kwargs is not None)
        if specs is None or binding is None or not is_marked or not (call.args or call.kwargs):
            return ""
        if specs.args is not None and not call.args:
            raise PipelineError(
                "specs has args, but all arguments of the batch are passed by name, so that it would mark none of "
                "them; pass those that it marks by position"
            )
        marked_names = specs.kwargs if isinstance(specs.kwargs, dict) else {}
        names = [name for name in list(binding.parameters)[: len(call.args)] if name in marked_names]
        if names:
            raise PipelineError(
                f"specs has kwargs for {names[0]!r}, which is passed by position, so that it would not be marked; pass "
                "it by name"
            )
        return f"{len(call.args)} by position "

    def _batch_of_stream(self, stream: Stream, mode: Mode, own_rule: BatchRule) -> Batch:
        """Look at the first microbatch alone, and expect the others to be like it."""
        if own_rule.microbatch_size:
            raise PipelineError(
                f"a Stream brings microbatches of sizes of its own, beside microbatch_size = "
                f"{own_rule.microbatch_size}; pass the batch whole, or say how many it brings: microbatches= of the "
                "step, of the Stream or of the pipeline"
            )
        self.require_program(mode, own_rule.num_microbatches)
        indices = range(own_rule.num_microbatches)
        copy = None if self.copies is None else pinned_or_copied
        context = StreamContext(0, len(indices), mode.is_training, self.num_steps())
        reader = Reader(stream, self.rank, context, self.rule, self.stream_rules, self.read, copy, self._bind)
        part, slices = reader.begin()
        self._check_arguments(part)
        first = self._bind(StepRequest(part.args, part.kwargs, part.target))
        rule = _one_of(own_rule)
        empty_slices = [without_data(part) for part in slices]
        return Batch(
            [replace(empty_slices[0], index=index, length=0) for index in indices],
            [[replace(part, index=index) for part in empty_slices] for index in indices],
            _digests(rule, first, f"{len(indices)} off a stream "),
            _digests(rule, first, "off a stream "),
            reader=reader,
            number=len(indices),
            data=first,
        )

    def _bind(self, part: _Part) -> _Part:
        """Return a batch, or a part of one, with inputs and keywords as the layers take them."""
        if self.needs.binding is None:
            return part
        args, kwargs = self.needs.bind(part.args, part.kwargs)
        return replace(part, args=args, kwargs=kwargs)

    def _check_arguments(self, call: StepRequest | Part) -> None:
        if self.needs.inputs and not (call.args or call.kwargs):
            raise PipelineError(f"{self.name} holds the first stage and was given no inputs; pass it the batch")
        self.needs.require_device(call.args, call.target)
        self.needs.require_known(call.kwargs, has_target=call.target is not None)


def _with_microbatches(batch: Batch, number: int) -> Batch:
    """Return a batch that was not cut by rows with so many microbatches at least, all alike."""
    missing = range(len(batch.microbatches), number)
    if not missing:
        return batch
    return replace(
        batch,
        microbatches=batch.microbatches + [replace(batch.microbatches[0], index=index) for index in missing],
        slices=batch.slices + [[replace(part, index=index) for part in batch.slices[0]] for index in missing],
    )


def stream_of(call: StepRequest) -> Stream | None:
    """Return the stream that brings the whole batch; None where the caller passes the batch itself."""
    values = (*call.args, *call.kwargs.values(), call.target)
    if not any(isinstance(value, Stream) for value in values):
        return None
    stream = call.args[0] if call.args else None
    if isinstance(stream, Stream) and len(call.args) == 1 and not call.kwargs and call.target is None:
        return stream
    raise PipelineError(
        "a Stream brings inputs, keywords and target of each microbatch itself; pass it alone, as in step(stream)"
    )


def _number_of(call: StepRequest, rule: BatchRule) -> int | str | None:
    """Return what a rank says of the number of microbatches, for the ranks to compare."""
    if call.microbatches is None and not (call.args or call.kwargs or call.target is not None):
        return None
    return f"those of microbatch_size = {rule.microbatch_size}" if rule.microbatch_size else rule.num_microbatches


def _one_of(rule: BatchRule) -> BatchRule:
    """Return the rule of one microbatch, by itself."""
    return replace(rule, num_microbatches=1, microbatch_size=None)


def _digests(rule: BatchRule, call: StepRequest | Microbatch, kind: str = "") -> Digests:
    """Digest the layouts of inputs, keyword arguments and target; 0 stands for nothing given."""
    return (
        digest(kind + rule.signature(call.args, {}, None)) if call.args else 0,
        digest(kind + rule.signature((), call.kwargs, None)) if call.kwargs else 0,
        digest(kind + rule.signature((), {}, call.target)) if call.target is not None else 0,
    )
