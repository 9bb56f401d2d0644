"""Counts the memory of the ranks during a step, tensor by tensor, so that it says which stage holds what.

A storage counts once, under the first of: parameters and buffers, gradients, contexts for weight gradients,
activations, received messages, unsent messages. It is looked at between instructions. Memory
that an instruction takes and gives back by itself is not seen here, nor are the batch and the losses; on an
accelerator, torch's own counters beside these figures have them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import PipelineError, count_of
from penstock.execute.accelerator import allocator_bytes, reset_peak
from penstock.execute.control.collectives import Control
from penstock.execute.losses.results import StepResult
from penstock.execute.observing.held_tensors import held_by, queued
from penstock.execute.observing.layer_sizes import (
    LayerBytes,
    LayerSizes,
    SavedTensorTracker,
    StorageCounter,
    buffers_of,
    gather_sizes,
    gradients_of,
    state_of,
    storages,
)
from penstock.execute.observing.observer import Around, Observer
from penstock.execute.observing.rank_memory import MemoryPoint, Moment, RankMemory, StageMemory, memory_text
from penstock.execute.ops.keys import Keys
from penstock.execute.parameters.gradient_store import WeightInputs
from penstock.execute.rank_parameters import NO_HELD, RankParameters
from penstock.execute.stages.offloading import is_on_host, noting_saved, saved_in
from penstock.execute.stages.passes import SavedForward
from penstock.execute.stages.recompute import Checkpoint
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Bound, Step
from penstock.execute.transport.device_queue import DeviceQueue
from penstock.execute.transport.messages import Incoming
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.rank_names import rank_names
from penstock.ir.operations import IS_BACKWARD, RUNS_AUTOGRAD, RUNS_FORWARD
from penstock.ir.program import Program
from penstock.ir.units import format_bytes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MemoryReport:
    """The memory of all ranks in one training step; the same on every rank but for `result`. `print` shows tables."""

    ranks: tuple[RankMemory, ...]
    result: StepResult
    """Of the step that was looked at."""
    layer_bytes: LayerBytes
    """Made and kept by each layer of a microbatch, by the fields of `LayerCosts`; 0 where the step made none, such as
    contexts where no backward was split."""
    predicted_bytes: tuple[int, ...]
    """Per rank, the peak that the one model of memory has for these sizes, gradients and optimizer state included, with
    the buffers that are kept."""

    def __str__(self) -> str:
        return memory_text(self.ranks, self.predicted_bytes)

    def __repr__(self) -> str:
        most = max(self.ranks, key=lambda rank: rank.counted_bytes)
        counted = f"most {format_bytes(most.counted_bytes)} on rank {most.rank}"
        return f"<MemoryReport of {count_of(len(self.ranks), 'rank')}, {counted}>"


class MemoryWatch(Observer):
    """Looks at one rank's memory during one step, between its calls."""

    def __init__(
        self,
        stages: Sequence[Stage],
        device: torch.device,
        optimizer: Optimizer | None = None,
        queue: DeviceQueue | None = None,
        parameters: RankParameters | None = None,
    ) -> None:
        """`queue` has the messages of an accelerator, which hold their tensors until they are over.

        `parameters` knows what is held beside the parameters of the modules.
        """
        self.stages = stages
        self.device = device
        self.optimizer = optimizer
        self._queue = queue
        self.peak_activations = 0
        self.points: dict[Moment, MemoryPoint] = {}
        self.sizes = LayerSizes(stages, is_sharded=parameters is not None and parameters.is_sharded)
        self._rank_parameters = parameters
        self._parameters: frozenset[int] = frozenset()
        """Their addresses in the forward that runs."""
        self._tracker = SavedTensorTracker(self.sizes.note_saved)
        self._peak = RankMemory()
        self._stages = {stage.index: stage for stage in stages}
        self._keys: Keys | None = None
        self._stage_of_key: dict[int, int] = {}
        """Of what stages keep."""

    def begin(self, step: Step) -> None:
        self._look(step, Moment.BEGIN)
        reset_peak(self.device)

    def around(self, program: Program, bound: Bound) -> Around:
        instruction, is_wait = program.instruction(bound.row), bound.awaits is not None
        self._keys = self._keys or Keys(program, int(program.rank_of_row[bound.row]))
        kept = self._keys.kept_by(bound.row)
        if RUNS_FORWARD[instruction.op] and not is_wait:
            return partial(self._watching_forward, instruction.stage, kept)
        runs_autograd = RUNS_AUTOGRAD[instruction.op] and not is_wait
        return partial(self._watching_call, kept if runs_autograd else None, bool(IS_BACKWARD[instruction.op]))

    def end(self, step: Step, failed: bool) -> None:
        if not failed:
            self._look(step, Moment.END)

    def memory(self, rank: int) -> RankMemory:
        """Return what was seen in a step that is over."""
        peak = self._peak
        points = {**self.points, Moment.PEAK: self._point(Moment.PEAK, peak)}
        state = None if self.optimizer is None else [state_of(self.optimizer, each) for each in self.optimizer.state]
        return replace(
            peak,
            rank=rank,
            optimizer_bytes=None if state is None else StorageCounter().add(state),
            peak_activations=self.peak_activations,
            kept_bytes=NO_HELD.kept_bytes if self._rank_parameters is None else self._rank_parameters.held().kept_bytes,
            points=tuple(points[moment] for moment in Moment if moment in points),
        )

    @contextmanager
    def _watching_forward(self, stage: int, kept: int, step: Step) -> Iterator[None]:
        self._stage_of_key[kept] = stage
        note_outputs = partial(self._tracker.note_functions, stage)
        # Anew for each forward: where they are sharded, whole ones have no fixed place.
        self._parameters = frozenset(storages([each for own in self._stages.values() for each in own.parameters()]))
        with (
            self._tracker.of_stage(stage, self._parameters, self.attempt),
            noting_saved(partial(self.attempt, self._note_saved, {})),
            self.sizes.watching(self.attempt, note_outputs),
        ):
            yield
        self._look(step)

    def _note_saved(self, noted: dict[int, Tensor], tensor: Tensor) -> None:
        new = storages(tensor).keys() - noted.keys() - self._parameters
        noted |= dict.fromkeys(new, tensor)  # held to the end of the forward, so that no address is used twice
        if new:
            self.sizes.note_saved(tensor)

    @contextmanager
    def _watching_call(self, kept: int | None, is_backward: bool, step: Step) -> Iterator[None]:
        """Of what runs autograd, `kept` is the key of the forward's activations."""
        if is_backward and Moment.AFTER_WARM_UP not in self.points:
            self._look(step, Moment.AFTER_WARM_UP)
        stage = None if kept is None else self._stages[self._stage_of_key[kept]]
        before = {} if stage is None else storages(queued(stage.own_weight_gradients.fused))
        yield
        left = None if kept is None else step.values.get(kept)
        if stage is not None and isinstance(left, WeightInputs):
            self.sizes.note_contexts(stage, left, before)
        self._look(step)

    def _look(self, step: Step, moment: Moment | None = None) -> None:
        sample = self._sample(step)
        self.peak_activations = max(self.peak_activations, sum(stage.num_activations for stage in sample.stages))
        if not self._peak.stages or sample.counted_bytes > self._peak.counted_bytes:
            self._peak = sample
        if moment is not None:
            self.points[moment] = self._point(moment, sample)

    def _point(self, moment: Moment, sample: RankMemory) -> MemoryPoint:
        counted = allocator_bytes(self.device, peak=moment is Moment.PEAK)
        allocated, reserved = (None, None) if counted is None else counted
        return MemoryPoint(moment, sample.counted_bytes, allocated, reserved)

    def _by_kind(self, step: Step) -> list[dict[int, Any]]:
        """Return the values that stages keep, messages, and those that rows made."""
        kinds = [range(0)] * 3 if self._keys is None else [self._keys.kept, self._keys.messages, self._keys.made]
        return [{key: value for key, value in step.values.items() if key in kind} for kind in kinds]

    def _sample(self, step: Step) -> RankMemory:
        """Count every storage once, under the first of the columns that holds it."""
        counter = StorageCounter()
        parameters = {stage.index: [each for _, each in stage.named_parameters()] for stage in self.stages}
        always = {stage.index: [*parameters[stage.index], *buffers_of(stage)] for stage in self.stages}
        parameter_bytes = {stage: counter.add(own) for stage, own in always.items()}
        gradient_bytes = {stage: counter.add([*map(gradients_of, own)]) for stage, own in parameters.items()}
        beside = NO_HELD if self._rank_parameters is None else self._rank_parameters.held()
        for stage in parameters:
            parameter_bytes[stage] += counter.add(beside.parameters.get(stage, []))
            gradient_bytes[stage] += counter.add(beside.gradients.get(stage, []))
        num_activations, context_bytes = dict.fromkeys(parameters, 0), dict.fromkeys(parameters, 0)
        kept, messages, made = self._by_kind(step)
        forwards = [(self._stage_of_key[key], value) for key, value in kept.items()]
        for stage, value in forwards:
            if not isinstance(value, Checkpoint) and not is_on_host(value):
                num_activations[stage] += 1
                context_bytes[stage] += counter.add(held_by(value) if isinstance(value, WeightInputs) else [])
        activation_bytes = {stage: counter.add_storages(self._tracker.held(stage)) for stage in parameters}
        for stage, value in forwards:
            activation_bytes[stage] += counter.add(_inputs_in(value))
        columns = (parameter_bytes, gradient_bytes, num_activations, activation_bytes, context_bytes)
        received = [[each.tensors, each.numbers] if isinstance(each, Incoming) else each for each in messages.values()]
        followed, posted = ([], []) if self._queue is None else self._queue.held()
        return RankMemory(
            stages=tuple(StageMemory(stage, *(column[stage] for column in columns)) for stage in parameters),
            received_bytes=counter.add([*received, *followed, *beside.exchanged]),
            unsent_bytes=counter.add([*made.values(), *posted]),
        )


def _inputs_in(kept: Any) -> list[Any]:
    """Return the tensors that a stage keeps of a forward, without those that autograd holds in its own way."""
    match kept:
        case Checkpoint():
            return [kept.arguments, kept.keywords]
        case SavedForward():
            return [*kept.inputs, *saved_in(kept)]
    return []


def gather_memory(
    transport: Transport, watch: MemoryWatch, result: StepResult, predict: Callable[[LayerBytes], tuple[int, ...]]
) -> MemoryReport:
    """Give every rank what all ranks saw, and what is predicted of it; a collective.

    Raises:
        PipelineError: on every rank, if the memory of any could not be measured.
    """
    own = asdict(watch.memory(transport.rank)) if watch.failure is None else {}
    everyone = cast(list[dict[str, Any]], Control(transport).all_gather_object(own))
    for rank, row in enumerate(everyone):
        if not row:
            text = "the step ran, but its memory was not measured on this rank; its log (logger penstock) says why"
            names = rank_names(transport)
            raise PipelineError(f"{names[rank]}: {text}", rank=names.numbers[rank])
    ranks = tuple(
        RankMemory(
            **{
                **row,
                "stages": tuple(StageMemory(**stage) for stage in row["stages"]),
                "points": tuple(MemoryPoint(**point) for point in row["points"]),
            }
        )
        for row in everyone
    )
    layer_bytes = gather_sizes(transport, watch.sizes.own(watch.optimizer))
    predicted = tuple(peak + rank.kept_bytes for peak, rank in zip(predict(layer_bytes), ranks, strict=True))
    return MemoryReport(ranks, result, layer_bytes, predicted)
