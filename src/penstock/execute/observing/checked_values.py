"""Finds the first instruction that makes a value which is not finite: the rank, the action and the layer.

    forward     every input of a stage, every output of a layer or of a module within it, every loss
    backward    every gradient of a layer's input, then those of the stage's parameters

A value from another rank was looked at there, so that the rank which made it is the one that is named. Each look
waits for the device; this is for finding out, not for training.

Guarantees: a value is reported with the action whose thread made it, also where two computations overlap.
Relies on: each computation runs in one thread, whose action is noted there; torch may run a backward in threads of its
own, and layers that run again in them are not looked at.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.execute.observing.observer import Around, Observer, once_per_program
from penstock.execute.stages.names import full_name
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Bound, Step
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.rank_names import rank_names
from penstock.execute.values.tensors import local_part
from penstock.execute.values.tree import tensors_of
from penstock.ir.instruction import Instruction
from penstock.ir.operations import IS_COMPUTE, RUNS_AUTOGRAD, RUNS_FORWARD
from penstock.ir.program import Program

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_BEFORE = "before the step"
_LEFT_OVER = "left over from an earlier step or backward, not made by this one: zero the gradients, then run it again"
_ADVICE = (
    ", the first here that are not finite. Look at what this layer was given and at its parameters; a lower learning "
    "rate, clipping or a wider type may help"
)
_Place = tuple[int, int, int]
"""Stage, microbatch, slice."""
_Action = Instruction | str
"""An instruction that ran, or "before the step" and "after the step"."""


class ValueChecks(Observer):
    """Looks at the values of one rank's stages."""

    def __init__(self, transport: Transport, stages: Sequence[Stage], gradient_attribute: str) -> None:
        names, rank = rank_names(transport), transport.rank
        self._number, self._name = names.numbers[rank], names[rank]
        self._stages = {stage.index: stage for stage in stages}
        self._gradient_attribute = gradient_attribute
        self._hooks = ExitStack()
        self._backwards = once_per_program(partial(_backwards, rank))
        self._thread_state = threading.local()
        """`action`: what runs in this thread, and `backward`: what will run backward through it."""

    def begin(self, step: Step) -> None:
        for stage in self._stages.values():
            for handle in self._hooked(stage):
                self._hooks.callback(handle.remove)
        if step.is_training:
            self._check_parameters(self._stages.values(), _BEFORE)

    def around(self, program: Program, bound: Bound) -> Around | None:
        instruction = program.instruction(bound.row)
        if bound.awaits is not None or not IS_COMPUTE[instruction.op]:
            return None
        place = (instruction.stage, instruction.microbatch, instruction.slice)
        backward = self._backwards(program).get(place) if RUNS_FORWARD[instruction.op] else None
        return partial(self._checking, instruction, backward)

    def end(self, step: Step, failed: bool) -> None:
        self._hooks.close()
        if step.is_training and not failed:
            self._check_parameters(self._stages.values(), "after the step")

    # ---- computations

    @contextmanager
    def _checking(self, instruction: Instruction, backward: Instruction | None, step: Step) -> Iterator[None]:
        self._thread_state.action, self._thread_state.backward = instruction, backward
        try:
            yield
        finally:
            self._thread_state.action = self._thread_state.backward = None
        if RUNS_FORWARD[instruction.op]:
            loss = step.losses.computed.get(place := (instruction.microbatch, instruction.slice))
            if loss is not None and step.losses.shares.factor(*place):  # else it may be anything
                self._check(instruction, "the loss", loss)
        else:
            self._check_parameters([self._stages[instruction.stage]], instruction)

    def _check_parameters(self, stages: Iterable[Stage], action: _Action) -> None:
        for name, parameter in chain.from_iterable(stage.named_parameters() for stage in stages):
            gradient = getattr(parameter, self._gradient_attribute, None)
            if gradient is not None:
                self._check(action, f"the gradient of {name!r}", gradient)

    # ---- layers

    def _hooked(self, stage: Stage) -> Iterator[Any]:
        first = next(iter(stage.layers))
        for name, layer in stage.layers.items():
            look = partial(self.attempt, self._look_at_inputs, name, name == first)
            yield layer.register_forward_pre_hook(look)
            for module_name, module in layer.named_modules():
                full_name_of_module = full_name(name, layer, module_name) if module_name else name
                look = partial(self.attempt, self._look_at_output, full_name_of_module)
                yield module.register_forward_hook(look)

    def _look_at_inputs(self, name: str, is_first: bool, module: nn.Module, inputs: Any) -> None:
        action = self._action()
        if action is None:
            return
        backward = self._thread_state.backward
        for tensor in tensors_of(inputs):
            if is_first:
                description = f"an input of layer {name!r}, the stage's first,"
                self._check(action, description, tensor)
            if backward and tensor.requires_grad and torch.is_grad_enabled():
                # A view of what was changed in place since has an outdated graph until its `grad_fn` is read;
                # register_hook of torch 2.13 does not read it, and ends the process.
                _ = tensor.grad_fn
                description = f"the gradient that layer {name!r} gives its input"
                look = partial(self.attempt, self._check, backward, description)
                tensor.register_hook(look)  # type: ignore[no-untyped-call]

    def _look_at_output(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        action = self._action()
        if action is not None:
            for tensor in tensors_of(outputs):
                self._check(action, f"the output of layer {name!r}", tensor)

    def _action(self) -> Instruction | None:
        """Return the instruction that runs.

        None in a function that is being compiled, and where torch runs a backward in a thread of its own, which may
        compute a forward again.
        """
        if torch.compiler.is_compiling():
            return None
        return getattr(self._thread_state, "action", None)

    def _check(self, action: _Action, description: str, tensor: Tensor) -> None:
        problem = not_finite(local_part(tensor))
        if not problem:
            return
        place = ""
        if isinstance(action, Instruction):
            place = f"stage {action.stage}, microbatch {action.microbatch}, in "
        finding, advice = f"{description} {problem}", _ADVICE
        if action == _BEFORE:
            finding, advice = f"{finding}, {_LEFT_OVER}", ""
        raise PipelineError(
            f"{action}: {finding}{advice}",
            rank=self._number,
            instruction=str(action),
            finding=f"{self._name}, {place}{action}: {finding}",
        )


def _backwards(rank: int, program: Program) -> dict[_Place, Instruction]:
    """Return, by place, the instruction that runs autograd's backward through the graph of the forward there."""
    rows = range(*program.offsets[rank : rank + 2].tolist())
    backward_instructions = [program.instruction(row) for row in rows if RUNS_AUTOGRAD[program.op[row]]]
    return {(row.stage, row.microbatch, row.slice): row for row in backward_instructions}


def not_finite(tensor: Tensor) -> str:
    """Say how many values of a tensor are not finite.

    Empty where all are, and where the values cannot be read: within `torch.func.vmap`, or on the meta device.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return ""
    with torch.no_grad():
        values = _stored_values(tensor)
        is_finite = torch.isfinite(values)
        try:
            if bool(is_finite.all()):
                return ""
        except RuntimeError:
            return ""
        num_nan = int(torch.isnan(values).sum())
        num_infinite = values.numel() - int(is_finite.sum()) - num_nan
    return f"has {num_nan} NaN and {num_infinite} infinite of its {values.numel()} values"


def _stored_values(tensor: Tensor) -> Tensor:
    """Return the values that a tensor stores, in a type that can be compared."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout in _COMPRESSED:
        return tensor.values()
    return tensor.float() if tensor.element_size() == 1 else tensor
