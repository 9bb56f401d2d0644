"""`Stream`: a batch that comes one microbatch after another from an iterator, each pulled when it is needed."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError, EndOfData, PipelineError, described
from penstock.execute.batch.preprocessing import Preprocess, Preprocessor, StreamContext
from penstock.execute.batch.step_numbers import StreamNumbers
from penstock.execute.values.layouts import leaf_text
from penstock.execute.values.tree import flatten, map_leaves

CopyLeaf = Callable[[Any], Any]
"""Returns a value of a microbatch in memory of its own."""


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

    `microbatches` says how many: a number, or an iterable with a number for each step, alike on all ranks. Without it,
    a step takes as many as it is called with, or as the pipeline has.

    The iterator gives one microbatch at a time: a tuple or list `(input, ..., target)`, or a `ps.Part`, which may have
    keywords, or no target. `preprocess`, if any, is called with each and returns one of these; a function that needs
    two arguments gets a `StreamContext` too. Where the ranks refuse a step, such a function is called with the first
    item again, so it must not change the item. A step leaves the rest for the next one. A rank with neither a first nor
    a last stage, nor layers that take keywords, needs none. Its tensors are copied, so the iterator may fill the same
    ones again.

    A stream is one rank's: ranks that are threads of one process need one each. After a step that failed, what is left
    of its microbatches is passed over, so that all ranks go on with the same ones.

    Raises:
        ConfigError: there is nothing to iterate over, `preprocess` cannot be called so, or `microbatches` is neither.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        preprocess: Preprocess | None = None,
        microbatches: int | Iterable[int] | None = None,
    ) -> None:
        if not isinstance(source, Iterable):
            raise ConfigError(f"{described(source)} gives no microbatches; pass an iterable of them", key="source")
        self._items: Iterator[Any] = iter(source)
        self._numbers = StreamNumbers(microbatches)
        self._is_begun = False
        """Whether the step that asked for a number, or was begun, has its bounds."""
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

    def number_of_step(self, asked: int | None) -> int | None:
        """Return how many microbatches the next step takes; None where the pipeline says it (`StreamNumbers.next`)."""
        is_again, self._is_begun = not self._is_begun, False
        return self._numbers.next(asked, is_again=is_again)

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
            self._is_begun = True
            self._peeked = self._peeked or self._pull()
        except StopIteration:
            raise EndOfData(
                f"the data are at an end: the stream of rank {rank} had {self._num_taken} microbatches, and all of "
                "them have been used. End the loop, or pass a new Stream on every rank"
            ) from None
        return self._peeked

    def undo_begin(self) -> None:
        """Stay before a step that the ranks refused: the next one begins with the same microbatch."""
        if not self._is_begun:  # it was refused earlier: what a failed step has left is passed over in the next one
            return
        self._end, self._is_begun = self._begin, False
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
