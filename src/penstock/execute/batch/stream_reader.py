"""Takes one step's microbatches off a stream: checks that they are alike, cuts them, times them."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import PenstockWarning, PipelineError
from penstock.execute.batch.microbatch import Microbatch, split_batch
from penstock.execute.batch.slices import BatchRule
from penstock.execute.batch.stream import DataTimes, Part, Pull, Stream
from penstock.ir.timeline import DataWait


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRules:
    """What a pipeline asks of the microbatches of a stream."""

    has_variable_shapes: bool = False
    is_sum: bool = False
    """Whether losses are sums, which weigh the same whatever the sizes."""
    has_count: bool = False
    warn_s: float | None = None
    """A pull that takes longer is warned of."""


class Reader:
    """One step's way through a stream on one rank: checks, cuts and times what is pulled."""

    def __init__(
        self, stream: Stream, rank: int, rule: BatchRule, rules: StreamRules, *, read: Callable[[], float]
    ) -> None:
        self._stream = stream
        self.times = DataTimes()
        self.waits: list[DataWait] = []
        self._rank = rank
        self._rule = rule
        self._rules = rules
        self._read = read
        self._layout = ""
        self._sizes: list[tuple[int, int]] = []
        self._waiting: list[Microbatch] = []
        self._has_warned = False

    def begin(self) -> tuple[Part, list[Microbatch]]:
        """Look at the first microbatch of the step; return it as it came, and its slices.

        Raises:
            EndOfData: there is none.
            PipelineError: it cannot be cut, or the losses cannot be weighed without knowing all of them.
        """
        if self._rules.has_count:
            raise PipelineError(
                "count weighs microbatches by their targets, all of which must be known before the first backward, but "
                "a Stream brings one after another; pass the batch whole (as PreSplit), or use reduction='sum'"
            )
        pull = self._stream.begin_step(self._rank, self._rule.num_microbatches, self._read)
        if pull.is_of_this_step:
            self._note_wait(0, pull)
        self._layout = pull.part.layout()
        self._waiting = self._cut(0, pull.part)
        self._sizes = _sizes(self._waiting)
        return pull.part, self._waiting

    def next(self, index: int) -> list[Microbatch]:
        """Take the next microbatch, number `index` of the step, and return its slices.

        Raises:
            PipelineError: the stream has ended, or the microbatch does not fit the first one.
        """
        pull = self._stream.take(self._rank, self._read)
        self._note(index, pull)
        if index == 0:
            first, self._waiting = self._waiting, []
            return first
        self._note_wait(index, pull)
        layout = pull.part.layout()
        slices = self._cut(index, pull.part)
        if layout != self._layout and not self._rules.has_variable_shapes:
            raise PipelineError(
                f"microbatch {index} of the stream is {layout}, microbatch 0 of the step was {self._layout}; "
                f"expected one layout for all. Yield equal shapes, or create the pipeline with variable_shapes=True"
                f"{self._and_sums(slices)}",
                rank=self._rank,
            )
        if self._differs(slices) and not self._rules.is_sum:
            raise PipelineError(
                f"microbatch {index} of the stream has {_said(_sizes(slices))}, microbatch 0 of the step had "
                f"{_said(self._sizes)} ({layout}, and {self._layout}); a mean weighs losses by these numbers, which "
                "must be known before the first backward. Yield equal ones, use reduction='sum', or pass the batch "
                "whole (as PreSplit)",
                rank=self._rank,
            )
        return slices

    def _cut(self, index: int, part: Part) -> list[Microbatch]:
        specs = self._rule.specs
        (found,) = split_batch(part.args, part.kwargs, part.target, num_microbatches=1, specs=specs)
        return self._rule.slices(replace(found, index=index))

    def _differs(self, slices: Sequence[Microbatch]) -> bool:
        return _sizes(slices) != self._sizes

    def _and_sums(self, slices: Sequence[Microbatch]) -> str:
        if self._rules.is_sum or not self._differs(slices):
            return ""
        return " and reduction='sum': a mean needs all sizes before the first backward"

    def _note_wait(self, index: int, pull: Pull) -> None:
        self.waits.append(DataWait(self._rank, index, pull.begin_s, pull.end_s))

    def _note(self, index: int, pull: Pull) -> None:
        self.times.waited_s += pull.times.waited_s
        self.times.prepared_s += pull.times.prepared_s
        took_s, limit_s = pull.times.waited_s + pull.times.prepared_s, self._rules.warn_s
        if limit_s is None or took_s <= limit_s or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"rank {self._rank} waited {pull.times.waited_s * 1e3:.0f} ms for the data of microbatch {index} and "
            f"prepared them for {pull.times.prepared_s * 1e3:.0f} ms, more than data_warn_s = {limit_s:g}; have them "
            "ready earlier, as a data loader with workers does",
            PenstockWarning,
            stacklevel=2,
        )


def _sizes(slices: Sequence[Microbatch]) -> list[tuple[int, int]]:
    return [(each.size, each.length) for each in slices]


def _said(sizes: Sequence[tuple[int, int]]) -> str:
    lengths = f" in slices of {[length for _, length in sizes]}" if len(sizes) > 1 else ""
    return f"{sizes[0][0]} rows{lengths}"
