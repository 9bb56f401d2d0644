"""`Reader`: takes one step's microbatches off a stream; it checks that they are alike, cuts them, and times them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.errors import PipelineError, warn
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.preprocessing import StreamContext
from penstock.execute.batch.stream import CopyLeaf, Part, Pull, Stream
from penstock.ir.timeline import DataWait

_Cut = tuple[Microbatch, list[Microbatch]]
"""A microbatch and its slices."""


@dataclass(slots=True)
class DataTimes:
    """The seconds that a rank's data cost it in one step."""

    waited_s: float = 0.0
    """Seconds until the iterator had given what was asked of it."""
    prepared_s: float = 0.0
    """Seconds in the `preprocess` of the stream, and in copying."""


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
