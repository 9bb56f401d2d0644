"""Counts the memory of the ranks during a step, tensor by tensor, so that it says which stage holds what.

A storage counts once, under the first of: parameters and buffers, gradients, contexts for weight gradients,
activations, received messages, unsent messages. It is looked at between instructions. What an instruction takes and
gives back by itself is measured by layer (`workspaces.py`) and counts in the prediction alone. The batch and the losses
are not seen; on an accelerator, torch's own counters beside these figures have them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
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
    gather_sizes,
    gradients_of,
    state_of,
    storages,
)
from penstock.execute.observing.observer import Around, Observer
from penstock.execute.observing.rank_memory import MemoryPoint, Moment, RankMemory, StageMemory, memory_text
from penstock.execute.observing.workspaces import AllocatorMeter, meter_for
from penstock.execute.ops.keys import Keys
from penstock.execute.parameters.gradient_store import WeightInputs
from penstock.execute.rank_parameters import RankParameters
from penstock.execute.stages.offloading import is_on_host, noting_saved, saved_in
from penstock.execute.stages.passes import SavedForward
from penstock.execute.stages.recompute import Checkpoint
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Bound, Step
from penstock.execute.transport.device_queue import DeviceQueue
from penstock.execute.transport.messages import Incoming
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.rank_names import rank_names
from penstock.ir.keeps import keeps
from penstock.ir.operations import IS_BACKWARD, RUNS_AUTOGRAD, RUNS_FORWARD, Value
from penstock.ir.program import Program
from penstock.ir.units import format_bytes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MemoryReport:
    """The memory of all ranks in one training step; the same on every rank but for `result`. `print` shows tables."""

    ranks: tuple[RankMemory, ...]
    result: StepResult
    """The result of the step that was looked at."""
    layer_bytes: LayerBytes
    """Made and kept by each layer of a microbatch, by the fields of `LayerCosts`; 0 where the step made none, such as
    contexts where no backward was split. Workspaces are what a layer's forward, or backward, took and gave back."""
    predicted_bytes: tuple[int, ...]
    """Per rank, the peak that the one model of memory has for these sizes, gradients and optimizer state included, with
    the workspaces and the buffers that are kept."""

    def __str__(self) -> str:
        return memory_text(self.ranks, self.predicted_bytes)

    def __repr__(self) -> str:
        most = max(self.ranks, key=lambda rank: rank.counted_bytes)
        counted = f"most {format_bytes(most.counted_bytes)} on rank {most.rank}"
        return f"<MemoryReport of {count_of(len(self.ranks), 'rank')}, {counted}>"


@dataclass(eq=False)
class MemoryWatch(Observer):
    """Looks at one rank's memory during one step, between its calls."""

    stages: Sequence[Stage]
    device: torch.device
    optimizer: Optimizer | None
    queue: DeviceQueue | None
    """The queue of an accelerator's messages, which hold their tensors until they are over."""
    parameters: RankParameters
    """The parameters of the rank, which know the tensors that are held beside those of the modules."""

    def __post_init__(self) -> None:
        self._meter = meter_for(self.device)
        self.sizes = LayerSizes(self.stages, self._meter, is_sharded=self.parameters.is_sharded)
        self._points: dict[Moment, MemoryPoint] = {}
        self._peak, self._peak_activations = RankMemory(), 0
        self._addresses: frozenset[int] = frozenset()
        """Addresses of the parameters in the forward that runs."""
        self._tracker = SavedTensorTracker(self.sizes.note_saved)
        self._stages = {stage.index: stage for stage in self.stages}
        self._keys: Keys | None = None
        self._keeps: NDArray[np.int8]
        """[num_rows] the `Value` that each row begins to keep."""
        self._stage_of_key: dict[int, int] = {}
        """Stage of each activation, by its key in `Step.values`."""

    def begin(self, step: Step) -> None:
        self._look(step, Moment.BEGIN)
        reset_peak(self.device)

    def around(self, program: Program, bound: Bound) -> Around:
        instruction, is_wait = program.instruction(bound.row), bound.awaits is not None
        if self._keys is None:
            self._keys, self._keeps = Keys(program, int(program.rank_of_row[bound.row])), keeps(program)
        activation_key = self._keys.activation_of(bound.row)
        if RUNS_FORWARD[instruction.op] and not is_wait:
            # A forward that runs again takes as much as the first one, but the first keeps nothing: what it gives back
            # is more than a workspace, and it all is in the activation of the second.
            has_workspace = bool(self._keeps[bound.row] != Value.CHECKPOINT)
            return partial(self._watching_forward, instruction.stage, activation_key, has_workspace)
        if IS_BACKWARD[instruction.op] and not is_wait:
            runs_autograd = bool(RUNS_AUTOGRAD[instruction.op])
            return partial(self._watching_backward, instruction.stage, activation_key, runs_autograd)
        return partial(_looking_behind, self._look)

    def end(self, step: Step, failed: bool) -> None:
        if not failed:
            self._look(step, Moment.END)

    def memory(self, rank: int) -> RankMemory:
        """Return the memory of this rank in a step that is over."""
        points = {**self._points, Moment.PEAK: self._point(Moment.PEAK, self._peak)}
        optimizer_bytes = None
        if self.optimizer is not None:
            state = [state_of(self.optimizer, parameter) for parameter in self.optimizer.state]
            optimizer_bytes = StorageCounter().add(state)
        return replace(
            self._peak,
            rank=rank,
            optimizer_bytes=optimizer_bytes,
            peak_activations=self._peak_activations,
            kept_bytes=self.parameters.held().kept_bytes,
            points=tuple(points[moment] for moment in Moment if moment in points),
        )

    @contextmanager
    def _watching_forward(self, stage: int, activation_key: int, has_workspace: bool, step: Step) -> Iterator[None]:
        self._stage_of_key[activation_key] = stage
        note_outputs = partial(self._tracker.note_functions, stage)
        # The addresses are taken anew for each forward: gathered parameters have no fixed place.
        self._addresses = frozenset(storages([[*stage.parameters()] for stage in self.stages]))
        with (
            self._tracker.tracking(stage, self._addresses, self.attempt),
            noting_saved(partial(self.attempt, self._note_saved, {})),
            self.sizes.watching(self._stages[stage], self.attempt, note_outputs, has_workspace=has_workspace),
        ):
            yield
        self._look(step)

    def _note_saved(self, saved_storages: dict[int, Tensor], tensor: Tensor) -> None:
        new = storages(tensor).keys() - saved_storages.keys() - self._addresses
        # Held to the end of the forward, so that no address is used twice.
        saved_storages |= dict.fromkeys(new, tensor)
        if new:
            self.sizes.note_saved(tensor)

    @contextmanager
    def _watching_backward(
        self, stage_index: int, activation_key: int, runs_autograd: bool, step: Step
    ) -> Iterator[None]:
        """Look at the memory after a backward or a part of one, which `runs_autograd` but where it is a W."""
        if Moment.AFTER_WARM_UP not in self._points:
            self._look(step, Moment.AFTER_WARM_UP)
        stage = self._stages[stage_index]
        queue_addresses = storages(queued(stage.own_weight_gradients.fused)) if runs_autograd else {}
        if runs_autograd:
            watching = self.sizes.watching_backward(stage, self.attempt)
        else:
            watching = self.sizes.watching_weights(stage, step.values.get(activation_key), self.attempt)
        with watching:
            yield
        weight_inputs = step.values.get(activation_key) if runs_autograd else None
        if isinstance(weight_inputs, WeightInputs):
            self.sizes.note_contexts(stage, weight_inputs, queue_addresses)
        self._look(step)

    def _look(self, step: Step, moment: Moment | None = None) -> None:
        sample = self._sample(step)
        num_activations = sum(stage.num_activations for stage in sample.stages)
        self._peak_activations = max(self._peak_activations, num_activations)
        if not self._peak.stages or sample.counted_bytes > self._peak.counted_bytes:
            self._peak = sample
        if moment is not None:
            self._points[moment] = self._point(moment, sample)

    def _point(self, moment: Moment, sample: RankMemory) -> MemoryPoint:
        if isinstance(self._meter, AllocatorMeter) and moment is Moment.PEAK:
            return MemoryPoint(moment, sample.counted_bytes, *self._meter.most())
        allocator = allocator_bytes(self.device) or (None, None)
        return MemoryPoint(moment, sample.counted_bytes, *allocator)

    def _sample(self, step: Step) -> RankMemory:
        """Count every storage once, under the first of the columns that holds it."""
        counter, keys = StorageCounter(), self._keys
        key_ranges = [range(0)] * 3 if keys is None else [keys.activations, keys.messages, keys.results]
        activations, messages, outputs = (
            {key: value for key, value in step.values.items() if key in key_range} for key_range in key_ranges
        )
        forwards = [(self._stage_of_key[key], activation) for key, activation in activations.items()]
        # The order of these calls matters: a storage counts in the first column that holds it.
        parameter_bytes, gradient_bytes = self._parameter_and_gradient_bytes(counter)
        num_activations, context_bytes = self._contexts(forwards, counter)
        activation_bytes = self._activation_bytes(forwards, counter)
        columns = (parameter_bytes, gradient_bytes, num_activations, activation_bytes, context_bytes)
        received = [
            (message.tensors, message.numbers) if isinstance(message, Incoming) else message
            for message in messages.values()
        ]
        queued_receives, queued_messages = ([], []) if self.queue is None else self.queue.held_tensors()
        exchanged = self.parameters.held().exchanged
        return RankMemory(
            stages=tuple(StageMemory(stage, *(column[stage] for column in columns)) for stage in self._stages),
            received_bytes=counter.add([*received, *queued_receives, *exchanged]),
            unsent_bytes=counter.add([*outputs.values(), *queued_messages]),
        )

    def _parameter_and_gradient_bytes(self, counter: StorageCounter) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes of parameters with buffers, and those of gradients, by stage."""
        parameters = {stage.index: [parameter for _, parameter in stage.named_parameters()] for stage in self.stages}
        buffers = {stage.index: [[*layer.buffers()] for layer in stage.layers.values()] for stage in self.stages}
        parameter_bytes = {stage: counter.add([params, buffers[stage]]) for stage, params in parameters.items()}
        gradient_bytes = {stage: counter.add([*map(gradients_of, params)]) for stage, params in parameters.items()}
        shards = self.parameters.held()
        for stage in parameters:
            parameter_bytes[stage] += counter.add(shards.parameters.get(stage, []))
            gradient_bytes[stage] += counter.add(shards.gradients.get(stage, []))
        return parameter_bytes, gradient_bytes

    def _contexts(
        self, forwards: Sequence[tuple[int, Any]], counter: StorageCounter
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return the number of live activations, and the bytes that weight gradients wait for, by stage."""
        num_activations, context_bytes = dict.fromkeys(self._stages, 0), dict.fromkeys(self._stages, 0)
        for stage, activation in forwards:
            if not isinstance(activation, Checkpoint) and not is_on_host(activation):
                num_activations[stage] += 1
                entries = activation.entries if isinstance(activation, WeightInputs) else ()
                context_bytes[stage] += counter.add([held_by(entry).tensors for entry in entries])
        return num_activations, context_bytes

    def _activation_bytes(self, forwards: Sequence[tuple[int, Any]], counter: StorageCounter) -> dict[int, int]:
        """Return the bytes that autograd holds, and those of inputs beside them, by stage."""
        activation_bytes = {
            stage: counter.add_storages(self._tracker.bytes_by_address(stage)) for stage in self._stages
        }
        for stage, activation in forwards:
            inputs: list[Any] = []
            if isinstance(activation, Checkpoint):
                inputs = [activation.arguments, activation.keywords]
            elif isinstance(activation, SavedForward):
                inputs = [*activation.inputs, *saved_in(activation)]
            activation_bytes[stage] += counter.add(inputs)
        return activation_bytes


@contextmanager
def _looking_behind(look: Callable[[Step], object], step: Step) -> Iterator[None]:
    """Look at the memory behind a call that computes nothing."""
    yield
    look(step)


def gather_memory(
    transport: Transport, watch: MemoryWatch, result: StepResult, predict: Callable[[LayerBytes], tuple[int, ...]]
) -> MemoryReport:
    """Give every rank the memory of all ranks, and the peaks that are predicted; a collective.

    Raises:
        PipelineError: on every rank, if the memory of any could not be measured.
    """
    local_memory = asdict(watch.memory(transport.rank)) if watch.failure is None else {}
    memory_by_rank = cast(list[dict[str, Any]], Control(transport).all_gather_object(local_memory))
    for rank, row in enumerate(memory_by_rank):
        if not row:
            text = "the step ran, but its memory was not measured on this rank; its log (logger penstock) says why"
            names = rank_names(transport)
            raise PipelineError(f"{names[rank]}: {text}", rank=names.numbers[rank])
        row["stages"] = tuple(StageMemory(**stage) for stage in row["stages"])
        row["points"] = tuple(MemoryPoint(**point) for point in row["points"])
    ranks = tuple(RankMemory(**row) for row in memory_by_rank)
    layer_bytes = gather_sizes(transport, watch.sizes.local_sizes(watch.optimizer))
    peaks = zip(predict(layer_bytes), ranks, strict=True)
    predicted = tuple(peak + rank.kept_bytes for peak, rank in peaks)
    return MemoryReport(ranks, result, layer_bytes, predicted)
