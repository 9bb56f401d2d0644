"""Steps that fail: a layer is late, raises, kills its process, or queues what fails when the device runs it."""

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import PipelineError
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.emulated.pipelines import DRAWING, IN_MEMORY, LENGTH, ROWS, WIDTH, Block, transport_of
from tests.emulated.planting import replaced
from tests.emulated.rank_threads import store_of_scenario
from tests.emulated.runtime import RUNTIME

DEADLINE_S, NEVER_S = 2.0, 600.0
"""The deadline of a step in which ranks are to wait for it, and that of all others."""
NUM_MICROBATCHES = 4
HOST = "penstock.construction_plan:host_of_processes"
CALL = 2
"""The fault is in the call of a layer for this microbatch of a step, counted from 0."""


@dataclass(frozen=True)
class Failing:
    """A training in which one step fails, or none."""

    kind: str | None
    """late, raises, kernel, or dies, of a process; None: the step that would have failed is left out.

    A late layer goes on when all other ranks have ended their step.
    """
    place: str = "forward"
    culprit: int = 1
    num_ranks: int = 3
    run_ahead: int | None = 2
    family: str = "1f1b"
    memory: str = "device"
    """Where batches are, as in `Cell`."""
    are_apart: bool = False
    """Whether each rank is on a host of its own: none sees the position of another, nor has a socket to it."""
    deadline_s: float = DEADLINE_S
    blocks_hosts: bool = False
    """Whether the layers of all ranks but the culprit copy to the host, which so waits for its device."""
    messages: str = "posted"
    one_stream: bool = False

    @property
    def is_found_by_the_deadline(self):
        """Whether nothing else tells the other ranks."""
        return self.kind in ("late", "dies") or self.are_apart

    def __str__(self):
        return f"{self.kind} in {self.place} of rank {self.culprit}, run_ahead={self.run_ahead}, {self.family}"


class Boom(Exception):
    """What the layer raises."""


@dataclass
class Ended:
    """How a rank's failing step ended, and what it has trained around it."""

    error: str = ""
    text: str = ""
    blamed: int | None = None
    began_s: float | None = None
    """When the fault began, on the culprit alone; and when the error came; both by one clock."""
    ended_s: float | None = None
    losses: tuple = ()
    weights: dict | None = None


class Fault:
    """What a layer does once it is armed; the layers of one rank share it."""

    def __init__(self, kind, others):
        self.kind, self.others = kind, others
        self.is_armed, self.calls, self.began_s = False, 0, None

    def happen(self, tensor):
        if not self.is_armed:
            return
        self.calls += 1
        if self.calls != CALL + 1:
            return
        self.began_s = time.monotonic()
        if self.kind == "late":
            self.others.wait()
        elif self.kind == "raises":
            raise Boom("the layer of the test")
        elif self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif tensor.device.type == "cuda":
            tensor.flatten()[torch.tensor([tensor.numel()], device=tensor.device)]  # fails when the device runs it
        else:
            RUNTIME.launch(RUNTIME.current_queue(), "bad kernel", _fail, [tensor], [tensor])


class OtherRanks:
    """Lets a late rank wait until all others have ended their step."""

    def __init__(self, store, num_ranks):
        """Count from what is in the store now: ranks that are processes take one store for many trainings."""
        self._store, self._num_before = store, store.add("ended", 0)
        self._num_others = num_ranks - 1

    def note_end(self):
        self._store.add("ended", 1)

    def wait(self):
        while self._store.add("ended", 0) - self._num_before < self._num_others:
            time.sleep(0.01)


class Faulty(nn.Module):
    """Computes what `block` does, with a fault in front of its forward or its backward."""

    def __init__(self, block, *, blocks_host):
        super().__init__()
        self.block, self.fault, self.place = block, None, None
        self.blocks_host = blocks_host

    def forward(self, hidden):
        if self.blocks_host:
            hidden.detach().cpu()
        if self.place == "forward":
            self.fault.happen(hidden)
        if self.place == "backward":
            hidden = _InBackward.apply(hidden, self.fault)
        return self.block(hidden)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden, fault):
        context.fault = fault
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context, gradient):
        context.fault.happen(gradient)
        return gradient, None


def train_around_a_failure(rank, num_ranks, failing, kind):
    """Take one step, one that fails, and one more."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    options = {"is_direct": False} if failing.are_apart else {}
    options |= {"coalesces": failing.one_stream or failing.messages == "coalesced", "one_stream": failing.one_stream}
    with replaced(HOST, _apart) if failing.are_apart else nullcontext():
        transport = transport_of(rank, num_ranks, device, deadline_s=failing.deadline_s, **options)
        pipeline, fault = pipeline_with_fault(failing, device, transport, store_of_scenario("ends of steps"))
    try:
        return _three_steps(pipeline, fault, failing, device)
    finally:
        pipeline.close()


def train_around(transport, failing, device):
    """Do so with the ranks of a transport, which are processes."""
    pipeline, fault = pipeline_with_fault(failing, device, transport, dist.group.WORLD.get_group_store())
    try:
        return _three_steps(pipeline, fault, failing, device)
    finally:
        pipeline.close()


def _apart(original):
    return lambda: f"{original()}, {RUNTIME.host().name}"


def pipeline_with_fault(failing, device, transport, store):
    """Return this rank's pipeline, and what its faulty layer does where it is the culprit; all have the store."""
    rank, num_ranks = transport.rank, transport.num_ranks
    fault = Fault(failing.kind, OtherRanks(store, num_ranks))
    with DRAWING:
        torch.manual_seed(0)
        blocks_host = failing.blocks_hosts and rank != failing.culprit
        layers = [Faulty(Block(), blocks_host=blocks_host) for _ in range(2 * num_ranks)]
    for layer in layers[2 * rank : 2 * rank + 1] if rank == failing.culprit else []:
        layer.fault, layer.place = fault, failing.place
    pipeline = Pipeline(
        layers,
        build(failing.family, ranks=num_ranks, microbatches=NUM_MICROBATCHES),
        loss=nn.functional.mse_loss,
        transport=transport,
        device=device,
        run_ahead=failing.run_ahead,
        deadline_s=failing.deadline_s,
        messages=failing.messages,
        one_stream=failing.one_stream,
        frees_other_stages=False,
    )
    transport.deadline_s = NEVER_S
    return pipeline, fault


def _three_steps(pipeline, fault, failing, device):
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    ended, losses = Ended(), []
    for number in range(3):
        inputs, target = batch_of(generator, device, failing.memory)
        if number == 1:
            fail_a_step(pipeline, fault, failing, (inputs, target), ended)
            optimizer.zero_grad()
            if failing.kind in ("kernel", "dies"):
                return ended  # a device that has failed stays so, and a process that has died too
            continue
        losses.append(_step(pipeline, inputs, target).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    ended.losses = tuple(losses)
    ended.weights = {name: parameter.detach().cpu().tolist() for name, parameter in pipeline.named_parameters()}
    return ended


def batch_of(generator, device, memory="device"):
    shape = ROWS * NUM_MICROBATCHES, LENGTH, WIDTH
    return [IN_MEMORY[memory](torch.randn(shape, generator=generator), device) for _ in range(2)]


def _step(pipeline, inputs, target):
    """Take a step; where the ranks have not met after a failure, because one learned late of it, once more."""
    try:
        return pipeline.step(inputs, target=target)
    except PipelineError as error:
        if "the ranks could not start afresh" not in str(error):
            raise
    return pipeline.step(inputs, target=target)


def fail_a_step(pipeline, fault, failing, batch, ended):
    if failing.kind is None:
        return
    fault.is_armed, transport = True, pipeline.transport
    transport.deadline_s = failing.deadline_s if failing.is_found_by_the_deadline else NEVER_S
    try:
        pipeline.step(batch[0], target=batch[1])
    except PipelineError as error:
        for tensor in batch if failing.memory != "device" else ():
            tensor.fill_(float("nan"))  # the step is over, so the batch is the caller's again
        ended.ended_s = time.monotonic()
        ended.error, ended.text, ended.blamed = type(error).__name__, str(error), error.rank
    fault.is_armed, ended.began_s, transport.deadline_s = False, fault.began_s, NEVER_S
    if fault.began_s is None:
        fault.others.note_end()


def _fail():
    raise RuntimeError("an assertion on the device")
