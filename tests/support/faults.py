"""Faults to plant in a rank: a pipeline whose layers, loss, messages and optimizer step misbehave when told to.

A `Switch` is the rank's own: whatever may misbehave calls `reach(place)`, and the armed fault strikes at its time. A
hang really lasts until `wake`, or until SIGUSR1 comes.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import nn

from penstock import Pipeline
from penstock.errors import PipelineError
from penstock.execute.transport import LocalTransport, Ticket, TorchTransport
from penstock.execute.transport.protocol import Tag
from tests.support.reference import reference_step

NUM_RANKS = 4
NUM_MICROBATCHES = 4
WIDTH = 6
DEADLINE_S = 2.0
LONGEST_S = 60
"""How long all steps of a test may take on a busy machine."""
NEVER_S = 10 * LONGEST_S
"""A deadline that no wait of a test comes to."""
NEVER_SENT = -1


class PlantedError(Exception):
    """What a rank raises that was told to raise."""


@dataclass(frozen=True)
class Fault:
    """What happens, to which rank, when it comes to a place for the `call`-th time in a step, counted from 0."""

    kind: str
    """raise, hang, kill or stop."""
    rank: int
    place: str
    """forward, backward, loss, send, receive or optimizer."""
    call: int = 0
    error: type = PlantedError

    @property
    def instruction(self):
        """What the message must say that the rank was in; None where the order of messages decides."""
        letters = {"forward": "F", "backward": "B", "loss": "F"}
        if self.place == "optimizer":
            return f"{self.rank}STEP"
        return f"{self.rank}{letters[self.place]}{self.call}" if self.place in letters else None


class Switch:
    """Strikes when its rank comes to the place of the armed fault."""

    def __init__(self, rank):
        self.rank = rank
        self._fault = None
        self._num_calls = 0
        self._is_awake = False

    def arm(self, fault):
        self._fault = fault if fault is not None and fault.rank == self.rank else None
        self._num_calls = 0
        self._is_awake = False

    def wake(self, *_):
        self._is_awake = True

    def reach(self, place):
        """Suffer the fault that is due here."""
        fault = self._fault
        if fault is None or fault.place != place:
            return
        self._num_calls += 1
        if self._num_calls == fault.call + 1:
            self._strike(fault.kind, fault.error)

    def _strike(self, kind, error):
        if kind == "raise":
            raise error("planted")
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        while kind == "hang" and not self._is_awake:
            hang_here()


def hang_here():
    time.sleep(0.02)


class Layer(nn.Module):
    """One layer, and one stage, that reaches its switch in its forward and in its backward."""

    def __init__(self, switch):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._switch = switch

    def forward(self, inputs):
        self._switch.reach("forward")
        outputs = torch.tanh(self.linear(inputs))
        if outputs.requires_grad:
            outputs.register_hook(self._reach_backward)
        return outputs

    def _reach_backward(self, gradient):
        self._switch.reach("backward")


class FaultyTransport:
    """Real wires that reach a switch at every message, and may lose or hold back one."""

    def __init__(self, wires, switch):
        self._wires = wires
        self._switch = switch
        self.loses = None
        """Lost: the send to this peer that comes next."""
        self.swaps = False
        """Whether sends to the next rank stay behind the first send to the previous one."""
        self._held = []

    def __getattr__(self, name):
        return getattr(self._wires, name)

    def post_send(self, peer, tensor, tag=Tag.DATA):
        if tag is not Tag.DATA:
            return self._wires.post_send(peer, tensor, tag)
        self._switch.reach("send")
        if peer == self.loses or (self.swaps and peer > self.rank):
            self._held += [(peer, tensor)] if self.swaps else []
            self.loses = None
            return Ticket(peer, True, NEVER_SENT)
        ticket = self._wires.post_send(peer, tensor)
        if self.swaps and peer < self.rank:
            self._held = [self._wires.post_send(*held) for held in self._held]
            self.swaps = False
        return ticket

    @property
    def deadline_s(self):
        return self._wires.deadline_s

    @deadline_s.setter
    def deadline_s(self, deadline_s):
        self._wires.deadline_s = deadline_s

    def post_receive(self, peer, tensor, tag=Tag.DATA):
        if tag is Tag.DATA:
            self._switch.reach("receive")
        return self._wires.post_receive(peer, tensor, tag)

    def wait(self, ticket, limit_s=None):
        if ticket.serial != NEVER_SENT:
            self._wires.wait(ticket, limit_s)


@dataclass(frozen=True)
class Ending:
    """How a step ended on one rank."""

    took_s: float
    error: Exception | None = None
    loss: object = None
    gradients: object = None

    @property
    def text(self):
        return str(self.error)


@dataclass(frozen=True)
class FaultyRank:
    """One rank of a pipeline of four stages, and what may go wrong in it."""

    switch: Switch
    transport: FaultyTransport
    pipeline: Pipeline

    @classmethod
    def start(cls, wires):
        switch = Switch(wires.rank)
        transport = FaultyTransport(wires, switch)
        pipeline = Pipeline(
            make_layers(switch),
            "1f1b",
            NUM_MICROBATCHES,
            partial(mean_square, switch),
            transport=transport,
            optimizer_step=partial(switch.reach, "optimizer"),
        )
        return cls(switch, transport, pipeline)

    @classmethod
    def start_warm(cls, deadline_s):
        """Start when torch has imported what its first backward imports, which may take longer than the deadline."""
        patient = cls.start(TorchTransport(deadline_s=LONGEST_S))
        patient.step()
        patient.pipeline.close()
        return cls.start(TorchTransport(deadline_s=deadline_s))

    def step(self, fault=None, *, call="step"):
        """Run one step from zero gradients, with this fault or none, and tell how it ended."""
        for _, parameter in self.pipeline.named_parameters():
            parameter.grad = None
        self.switch.arm(fault)
        inputs, target = batch()
        begin_s = time.monotonic()
        try:
            result = getattr(self.pipeline, call)(inputs, target=target)
        except PipelineError as error:
            ending = Ending(time.monotonic() - begin_s, error)
            error.__cause__ = error.__context__ = error.__traceback__ = None  # they would not travel between processes
            return ending
        gradients = {name: parameter.grad for name, parameter in self.pipeline.named_parameters()}
        return Ending(time.monotonic() - begin_s, loss=result.loss, gradients=gradients)


class FaultyThreads:
    """The four ranks as threads of this process; `each(act)` calls `act(rank)` on all of them at once."""

    def __init__(self, *, deadline_s=DEADLINE_S):
        wires = LocalTransport.create(NUM_RANKS, deadline_s)
        self.ranks = each_on_a_thread(lambda rank: FaultyRank.start(wires[rank]))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for rank in self.ranks:
            rank.switch.wake()
            rank.pipeline.close()

    def each(self, act):
        return each_on_a_thread(lambda rank: act(self.ranks[rank]))

    def step(self, fault=None):
        """Run one step on all ranks; a rank that hangs is woken once all others have ended."""
        num_ended = count(1)

        def act(rank):
            ending = rank.step(fault)
            is_other = fault is not None and rank.switch.rank != fault.rank
            if is_other and next(num_ended) == NUM_RANKS - 1:
                self.ranks[fault.rank].switch.wake()
            return ending

        return self.each(act)


def each_on_a_thread(act):
    """Return `act(rank)` of every rank, each on a thread of its own; a late or broken one gives its error."""
    answers = [TimeoutError(f"rank {rank} did not end") for rank in range(NUM_RANKS)]

    def run(rank):
        try:
            answers[rank] = act(rank)
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    return answers


def make_layers(switch):
    generator = torch.Generator().manual_seed(0)  # ranks that are threads share the default one
    layers = [Layer(switch) for _ in range(NUM_RANKS)]
    with torch.no_grad():
        for parameter in nn.ModuleList(layers).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH, generator=generator).unbind()


def mean_square(switch, outputs, target):
    switch.reach("loss")
    return ((outputs - target) ** 2).mean()


def is_right(endings):
    """Whether a step gave the reference's loss and gradients, bit for bit, on each of these ranks."""
    layers = make_layers(Switch(0))
    inputs, target = batch()
    loss = partial(mean_square, Switch(0))
    expected = reference_step(layers, (inputs,), {}, target, loss=loss, num_microbatches=NUM_MICROBATCHES)
    parameters = {f"{index}.{name}": p for index, layer in enumerate(layers) for name, p in layer.named_parameters()}
    return all(
        ending.error is None
        and torch.equal(ending.loss, expected.loss)
        and len(ending.gradients) == len(parameters) // NUM_RANKS
        and all(torch.equal(gradient, parameters[name].grad) for name, gradient in ending.gradients.items())
        for ending in endings
    )
