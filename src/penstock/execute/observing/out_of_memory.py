"""Explains a step that ran out of a device's memory: what the rank holds, and which options make that less.

The error of torch says how much the allocator holds, but not of what.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.errors import count_of
from penstock.execute.accelerator import allocator_bytes
from penstock.execute.control.error_notes import note_advice
from penstock.execute.observing.layer_sizes import StorageCounter, gradients_of
from penstock.execute.parameters.gradient_store import WeightInputs
from penstock.execute.stages.passes import SavedForward
from penstock.execute.stages.recompute import Checkpoint
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Step
from penstock.ir.units import format_bytes

_FIXES = (
    "recompute=True keeps the inputs of stages alone; more microbatches= make each smaller; split= gives this rank "
    "fewer layers; shard= shares out parameters, gradients and optimizer state over replicas. penstock compare says "
    "which schedules keep fewer microbatches"
)


@contextmanager
def explaining_out_of_memory(stages: Sequence[Stage], device: torch.device, step: Step) -> Iterator[None]:
    """Note on an error that says that memory is full what this rank held at that moment, and what would free some."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        note_advice(error, f"{_memory_text(stages, device, step)}. To hold less: {_FIXES}")
        raise


def _memory_text(stages: Sequence[Stage], device: torch.device, step: Step) -> str:
    """Say how many bytes of parameters, gradients and other tensors this rank held."""
    counter = StorageCounter()
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    parts = {"parameters": counter.add(parameters), "gradients": counter.add([*map(gradients_of, parameters)])}
    texts = [f"{format_bytes(num_bytes)} of {name}" for name, num_bytes in parts.items()]
    allocator = allocator_bytes(device)
    if allocator is not None:
        rest_bytes = max(allocator.allocated - sum(parts.values()), 0)
        texts.append(f"{format_bytes(rest_bytes)} of activations, messages, optimizer state and others")
    values = step.values.values()
    num_live = sum(isinstance(value, SavedForward | Checkpoint | WeightInputs) for value in values)
    return f"this rank held {', '.join(texts)}; {count_of(num_live, 'forward')} waited for a backward"
