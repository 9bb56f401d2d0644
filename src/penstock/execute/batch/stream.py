"""`Stream`: a batch that comes one microbatch after another from an iterator, each pulled when it is needed.

A `Reader` takes one step's microbatches off a stream: it checks that they are alike, cuts them, and times them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError, EndOfData, PipelineError, described, warn
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.preprocessing import Preprocess, Preprocessor, StreamContext
from penstock.execute.values.layouts import leaf_text
from penstock.execute.values.tree import flatten, map_leaves
from penstock.ir.timeline import DataWait

CopyLeaf = Callable[[Any], Any]
"""Returns a value of a microbatch in memory of its own."""
_Cut = tuple[Microbatch, list[Microbatch]]
"""A microbatch and its slices."""


class Part:
    """One microbatch of a stream, as `Pipeline.step` takes it: `ps.Part(tokens, mask=mask, target=t)`."""

    __slots__ = ("args", "kwargs", "target")

    def __init__(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.target = target

    def copied(self, copy: CopyLeaf | None = None) -> "Part":
        """Return the same with tensors in memory of their own; one that needs a gradient stays the caller's leaf.

        `copy` takes over each value; by default the memory is of the same kind.
        """
        args, kwargs, target = map_leaves(copy or copied, (self.args, self.kwargs, self.target))
        return Part(*args, target=target, **kwargs)

    def layout(self) -> str:
        """Say what it has; equal texts mean equal shapes on every stage."""
        texts = []
        for root, value in (("args", self.args), ("kwargs", self.kwargs), ("target", self.target)):
            leaves, tree = flatten(value)
            places = zip(tree.places(root), leaves, strict=True)
            texts += [f"{place} {leaf_text(leaf)}" for place, leaf in places]
        return ", ".join(texts) or "empty"


@dataclass(slots=True)
class DataTimes:
    """The seconds that a rank's data cost it in one step."""

    waited_s: float = 0.0
    """Seconds until the iterator had given what was asked of it."""
    prepared_s: float = 0.0
    """Seconds in the `preprocess` of the stream, and in copying."""


@dataclass(slots=True)
class Pull:
    """One microbatch off a stream, and what it cost."""

    part: Part
    begin_s: float
    got_s: float
    """Time at which the iterator had given it, on the clock that times the pull."""
    end_s: float
    is_of_this_step: bool = True
    """False where an earlier step has waited for it, and was then refused."""
    item: Any = None
    """The item that was prepared, where another step would prepare it otherwise."""


class Stream:
    """A batch for `Pipeline.step` and `evaluate` whose microbatches an iterator gives one by one.

        stream = ps.Stream(iter(loader))          on each rank that needs data, over the same data
        for _ in range(num_steps):
            pipeline.step(stream)                 takes the next `microbatches` of them

    The iterator gives one microbatch at a time: a tuple or list `(input, ..., target)`, or a `ps.Part`, which may have
    keywords, or no target. `preprocess`, if any, is called with each and returns one of these; a function that needs
    two arguments gets a `StreamContext` too. Where the ranks refuse a step, such a function is called with the first
    item again, so it must not change the item. A step leaves the rest for the next one. A rank with neither a first nor
    a last stage, nor layers that take keywords, needs none. Its tensors are copied, so the iterator may fill the same
    ones again.

    A stream is one rank's: ranks that are threads of one process need one each. After a step that failed, what is left
    of its microbatches is passed over, so that all ranks go on with the same ones.

    Raises:
        ConfigError: there is nothing to iterate over, or `preprocess` cannot be called so.
    """

    def __init__(self, source: Iterable[Any], *, preprocess: Preprocess | None = None) -> None:
        if not isinstance(source, Iterable):
            raise ConfigError(f"{described(source)} gives no microbatches; pass an iterable of them", key="source")
        self._items: Iterator[Any] = iter(source)
        self._preprocessor = Preprocessor(preprocess)
        self._first_context: StreamContext | None = None
        """Context of the first microbatch of the step that was begun last."""
        self._peeked: Pull | None = None
        self._unprepared: list[Any] = []
        self._num_taken = 0
        self._begin = 0
        self._end = 0
        self._rank: int | None = None
        self._read: Callable[[], float] = time.monotonic
        self._copy: CopyLeaf | None = None

    @property
    def position(self) -> int:
        """Microbatches before those of the step that was begun last."""
        return self._begin

    @property
    def num_taken(self) -> int:
        """Microbatches that steps have taken, or passed over, so far."""
        return self._num_taken

    def begin_step(
        self, rank: int, first: StreamContext, read: Callable[[], float], copy: CopyLeaf | None = None
    ) -> Pull:
        """Begin a step, and return its first microbatch: it is pulled off the iterator, but not taken.

        `first` is the context of this microbatch, which says how many the step has. Microbatches that the step before
        did not take, since it failed, are passed over first. `read` returns the time in seconds, by which pulls are
        timed. `copy` takes over each value, as in `Part.copied`.

        Raises:
            EndOfData: the iterator has no further microbatch.
            PipelineError: another rank uses this stream, or the iterator yields something that is no microbatch.
        """
        if self._rank not in (None, rank):
            raise PipelineError(
                f"rank {rank} was given the stream of rank {self._rank}; give each rank a Stream of its own"
            )
        self._rank, self._read, self._copy, self._first_context = rank, read, copy, first
        try:
            # `_begin` and `_end` count the microbatches before the last step and before its end. So this loop passes
            # over the rest of a step that failed. One microbatch may have left the iterator already: it was pulled and
            # not taken (`_peeked`), or its preprocessing failed (`_unprepared`).
            while self._num_taken < self._end:
                if self._peeked is None and not self._unprepared:
                    next(self._items)
                self._peeked, self._unprepared = None, []
                self._num_taken += 1
            # The bounds of this step are set before its first pull. If the pull fails on this rank, the rank passes
            # over the whole step next time, as the other ranks do.
            self._begin, self._end = self._num_taken, self._num_taken + first.number
            self._peeked = self._peeked or self._pull()
        except StopIteration:
            raise EndOfData(
                f"the data are at an end: the stream of rank {rank} had {self._num_taken} microbatches, and all of "
                "them have been used. End the loop, or pass a new Stream on every rank"
            ) from None
        return self._peeked

    def undo_begin(self) -> None:
        """Stay before a step that the ranks refused: the next one begins with the same microbatch."""
        self._end = self._begin
        if self._peeked is not None and self._preprocessor.needs_context:
            # The next step may be an evaluation, or one with another number of microbatches.
            self._unprepared, self._peeked = [self._peeked.item], None
        elif self._peeked is not None:
            self._peeked.is_of_this_step = False

    def take(self) -> Pull:
        """Return the next microbatch of the step, pulled now unless it has been looked at.

        Raises:
            PipelineError: there is none, or what the stream yields is no microbatch.
        """
        try:
            pull = self._peeked or self._pull()
        except StopIteration:
            size = self._end - self._begin
            raise PipelineError(
                f"the data ended inside a step: the stream of rank {self._rank} gave {self._num_taken - self._begin} "
                f"of its {size} microbatches, {self._num_taken} in all. Yield a multiple of {size}, or drop the rest "
                "before",
                rank=self._rank,
            ) from None
        self._peeked = None
        self._num_taken += 1
        return pull

    def _pull(self) -> Pull:
        begin_s = self._read()
        # An item stays until it has been prepared: a failed attempt must not lose one that other ranks still have.
        self._unprepared = self._unprepared or [next(self._items)]
        got_s = self._read()
        item = self._unprepared[0]
        assert self._first_context is not None, "a step was begun"
        context = replace(self._first_context, index=self._num_taken - self._begin)
        part = as_part(self._preprocessor.prepare(item, context))
        # A loader may fill one buffer again for each item, while microbatches before it wait for their backward, so the
        # values are copied. Writes by numpy or a file leave the version of a tensor as it is: a guard would miss them.
        part = part.copied(self._copy)
        self._unprepared = []
        return Pull(part, begin_s, got_s, self._read(), item=item if self._preprocessor.needs_context else None)


def copied(leaf: Any) -> Any:
    """Return a value in memory of its own, on the same device; what needs a gradient stays the caller's leaf."""
    return leaf.clone() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf


def as_part(item: Any) -> Part:
    """Return what a stream yielded, or a caller has as a tuple, as a part. Raises: PipelineError."""
    if isinstance(item, Part):
        return item
    if type(item) in (tuple, list) and len(item) > 1:
        *args, target = item
        return Part(*args, target=target)
    size = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
    raise PipelineError(
        f"a stream yielded a {type(item).__name__}{size} for a microbatch; expected a tuple or list (input, ..., "
        "target), or ps.Part(input, ..., target=..., keyword=...)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRules:
    """The demands of a pipeline on the microbatches of a stream."""

    has_variable_shapes: bool = False
    is_sum: bool = False
    """Whether losses are sums, which weigh the same whatever the sizes."""
    has_count: bool = False
    warn_s: float | None = None
    """Seconds; a pull that takes longer is warned of."""


@dataclass(slots=True, eq=False)
class Reader:
    """One step's way through a stream on one rank: checks, cuts and times what is pulled."""

    stream: Stream
    rank: int
    first: StreamContext
    """Context of the first microbatch of the step."""
    rule: BatchRule
    rules: StreamRules
    read: Callable[[], float]
    copy: CopyLeaf | None = None
    """Takes over the values of the stream, as in `Part.copied`."""
    bind: Callable[[Microbatch], Microbatch] = lambda microbatch: microbatch
    """Brings a microbatch into the form in which the layers take it."""
    times: DataTimes = field(default_factory=DataTimes)
    waits: list[DataWait] = field(default_factory=list)
    _layout: str = ""
    _sizes: Sequence[tuple[int, int]] = ()
    _first_cut: _Cut | None = None
    _has_warned: bool = False

    def begin(self) -> tuple[Part, list[Microbatch]]:
        """Look at the first microbatch of the step; return it as it came, and its slices.

        Raises:
            EndOfData: there is none.
            PipelineError: it cannot be cut, or the losses cannot be weighed without knowing all of them.
        """
        if self.rules.has_count:
            raise PipelineError(
                "count weighs microbatches by their targets, all of which must be known before the first backward, but "
                "a Stream brings one after another; pass the batch whole (as PreSplit), use reduction='sum', or "
                "count=None where all microbatches count alike"
            )
        part = self.stream.begin_step(self.rank, self.first, self.read, self.copy).part
        self._layout = part.layout()
        _, slices = self._first_cut = self._cut(0, part)
        self._sizes = _sizes(slices)
        return part, slices

    def next(self, index: int) -> _Cut:
        """Take the microbatch with this index in the step off the stream, and return it and its slices.

        Raises:
            PipelineError: the stream has ended. Or the microbatch differs from microbatch 0 of the step: in its layout
                (places, shapes and dtypes), unless the pipeline allows variable shapes; or in its rows or the lengths
                of its slices, unless losses are summed.
        """
        pull = self.stream.take()
        self._note(index, pull)
        # `begin` has cut microbatch 0 before the ranks agreed on the step, and has noted its layout and sizes.
        if index == 0:
            first_cut, self._first_cut = self._first_cut, None
            assert first_cut is not None, "begin() has cut it"
            return first_cut
        layout = pull.part.layout()
        microbatch, slices = self._cut(index, pull.part)
        # A mean weighs each loss by its size as part of the whole, which is not known before the last pull.
        cannot_be_weighed = _sizes(slices) != self._sizes and not self.rules.is_sum
        if layout != self._layout and not self.rules.has_variable_shapes:
            and_sums = " and reduction='sum': a mean needs all sizes before the first backward"
            raise PipelineError(
                f"microbatch {index} of the stream is {layout}, microbatch 0 of the step was {self._layout}; "
                f"expected one layout for all. Yield equal shapes, or create the pipeline with variable_shapes=True"
                f"{and_sums * cannot_be_weighed}",
                rank=self.rank,
            )
        if cannot_be_weighed:
            raise PipelineError(
                f"microbatch {index} of the stream has {_sizes_text(_sizes(slices))}, microbatch 0 of the step had "
                f"{_sizes_text(self._sizes)} ({layout}, and {self._layout}); a mean weighs losses by these numbers, "
                "which must be known before the first backward. Yield equal ones, use reduction='sum', or pass the "
                "batch whole (as PreSplit)",
                rank=self.rank,
            )
        return microbatch, slices

    def _cut(self, index: int, part: Part) -> _Cut:
        rule = replace(self.rule, num_microbatches=1)
        (only_microbatch,) = rule.microbatches(part.args, part.kwargs, part.target)
        microbatch = replace(self.bind(only_microbatch), index=index)
        return microbatch, self.rule.slices(microbatch)

    def _note(self, index: int, pull: Pull) -> None:
        if pull.is_of_this_step:
            self.waits.append(DataWait(self.rank, index, pull.begin_s, pull.end_s))
        limit_s = self.rules.warn_s
        waited_s, prepared_s = pull.got_s - pull.begin_s, pull.end_s - pull.got_s
        self.times.waited_s += waited_s
        self.times.prepared_s += prepared_s
        if limit_s is None or waited_s + prepared_s <= limit_s or self._has_warned:
            return
        self._has_warned = True
        warn(
            f"rank {self.rank} waited {waited_s * 1e3:.0f} ms for the data of microbatch {index} and prepared them "
            f"for {prepared_s * 1e3:.0f} ms, more than data_warn_s = {limit_s:g}; have them ready earlier, as a data "
            "loader with workers does"
        )


def _sizes(slices: Sequence[Microbatch]) -> list[tuple[int, int]]:
    return [(part.size, part.length) for part in slices]


def _sizes_text(sizes: Sequence[tuple[int, int]]) -> str:
    lengths = f" in slices of {[length for _, length in sizes]}" if len(sizes) > 1 else ""
    return f"{sizes[0][0]} rows{lengths}"
