"""Pipelines on the simulated clock: what computations, messages and reductions take is planted.

The hosts of the ranks meet in control messages, which go past the device. Here each of these brings the simulated time
of its sender along. Looks at messages take no time where nobody waits for the answer: ranks are threads, and one may be
ahead in its steps but behind on the simulated clock, so what it is seen to have done may be in the future.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

import penstock as ps
from penstock import Observer
from penstock.execute.observing.clock import Clock
from penstock.execute.transport import TorchTransport
from penstock.execute.transport.protocol import Tag
from penstock.ir.operations import IS_COMPUTE
from penstock.ir.timeline import Timeline
from tests.emulated.kernels import slow
from tests.emulated.pipelines import DEADLINE_S, DRAWING, OnTwoStreams, RankGroup
from tests.emulated.rank_threads import store_of_scenario
from tests.emulated.runtime import RUNTIME

WIDTH = 2
MESSAGE_BYTES = WIDTH * 4
"""A microbatch is one row of float32."""
NUM_WARM_UPS = 2
"""Steps in which shapes are agreed on, and it is found out which weight gradients wait for W."""


def host_now_s():
    return RUNTIME.host().now_s


def host_works(seconds):
    """Keep the host of the calling rank busy for so long on the simulated clock."""
    RUNTIME.host().now_s += seconds


def taking_no_time(call):
    def called(*arguments):
        host, before_s = RUNTIME.host(), host_now_s()
        try:
            return call(*arguments)
        finally:
            host.now_s = before_s

    return called


class TimedTransport(TorchTransport):
    """Brings the simulated time of the sender's host along with each message between hosts."""

    def __init__(self, *arguments, **options):
        self._times, self._num_posted, self._receipts = store_of_scenario("times"), {}, {}
        super().__init__(*arguments, **options)
        for name in ("has_left", "is_held_up"):
            setattr(self.device_queue, name, taking_no_time(getattr(self.device_queue, name)))
        self._wait_for_send, self._beside = taking_no_time(super().wait), torch.Stream("emu")

    def post_send(self, peer, tensor, tag=Tag.DATA):
        if tag is Tag.CONTROL:
            self._times.set(self._key(self.rank, peer), str(host_now_s()))
        return super().post_send(peer, tensor, tag)

    def post_receive(self, peer, tensor, tag=Tag.DATA):
        ticket = super().post_receive(peer, tensor, tag)
        if tag is Tag.CONTROL:
            self._receipts[ticket.serial] = self._key(peer, self.rank)
        return ticket

    def wait(self, ticket, limit_s=None):
        if ticket.is_send:
            with self._beside:  # the stream of the computations would wait for the future
                return self._wait_for_send(ticket, limit_s)
        super().wait(ticket, limit_s)
        sent = self._receipts.pop(ticket.serial, None)
        if sent is not None:
            host_works(max(float(self._times.get(sent)) - host_now_s(), 0.0))

    def _key(self, source, to):
        number = self._num_posted[source, to] = self._num_posted.get((source, to), 0) + 1
        return f"{source}/{to}/{number}"


@dataclass(frozen=True)
class Plan:
    """What is planted, and how it runs."""

    family: str
    num_ranks: int
    num_microbatches: int
    costs: ps.Costs
    run_ahead: int | None = 2
    is_recorded: bool = True
    is_overlapped: bool = False
    """Whether the two of an overlapped pair run on two streams."""

    def __str__(self):
        bandwidth = self.costs.bandwidth_bytes_per_s
        return f"{self.family}, {self.num_ranks} ranks, {MESSAGE_BYTES / bandwidth:g} s, run_ahead={self.run_ahead}"


@dataclass
class Timed:
    """What a rank has of the step in which things are planted."""

    queued_s: list
    """When its host has queued each computation."""
    recorded: Timeline | None


class _Product(torch.autograd.Function):
    """A product that takes the seconds of its layer; its backward computes the half that is asked for."""

    @staticmethod
    def forward(context, values, weight, layer):
        context.save_for_backward(values, weight)
        context.layer = layer
        made = values @ weight
        slow(made, layer.forward_s)
        return made

    @staticmethod
    def backward(context, gradient):
        values, weight = context.saved_tensors
        of_values = of_weight = None
        if ps.wants_input_gradient(context):
            of_values = gradient @ weight.t()
            slow(of_values, context.layer.input_s)
        if ps.wants_weight_gradient(context):
            of_weight = values.t() @ gradient
            slow(of_weight, context.layer.weight_s)
        return of_values, of_weight, None


class Paced(nn.Module):
    """The layer of a stage, as slow as planned."""

    def __init__(self, plan, stage):
        super().__init__()
        costs = plan.costs
        self.forward_s = costs.forward_s[stage]
        self.input_s, self.weight_s = costs.backward_input_s[stage], costs.backward_weight_s[stage]
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, values):
        return _Product.apply(values, self.weight, self)


class QueuedAt(Observer):
    """Notes when the host has queued each computation."""

    is_noting = False

    def __init__(self):
        self.queued_s = []

    def around(self, program, bound):
        return self._noting if bound.awaits is None and IS_COMPUTE[program.op[bound.row]] else None

    @contextmanager
    def _noting(self, step):
        if self.is_noting:
            self.queued_s.append(host_now_s())
        yield


def timed_step(rank, num_ranks, plan):
    """Take the steps of a plan on this rank; return what it has of the last one."""
    device, costs = torch.device("emu", rank), plan.costs
    schedule = ps.build(plan.family, ranks=num_ranks, microbatches=plan.num_microbatches)
    with DRAWING:
        layers = [Paced(plan, stage) for stage in range(schedule.num_stages)]
    host, group = QueuedAt(), RankGroup(rank, num_ranks, store_of_scenario())
    pipeline = ps.Pipeline(
        layers,
        schedule,
        loss=nn.functional.mse_loss,
        transport=TimedTransport(group, deadline_s=DEADLINE_S, device=device),
        device=device,
        clock=Clock(host_now_s, host="simulated"),
        run_ahead=plan.run_ahead,
        observers=[host],
        data_warn_s=None,
        frees_other_stages=False,
        overlap=OnTwoStreams(device) if plan.is_overlapped else None,
        **_collectives(costs, schedule.placement.stages_of_rank[rank], device),
    )
    for each in RUNTIME.communicators:
        each.latency_s, each.seconds_per_byte = 0.0, 1 / costs.bandwidth_bytes_per_s
    for _ in range(NUM_WARM_UPS):
        _step(pipeline, plan)
    torch.accelerator.synchronize(device)
    pipeline.control.all_gather_object(None)  # from here on all hosts have one time
    host.is_noting = True
    _step(pipeline, plan, record=plan.is_recorded)
    found = Timed(host.queued_s, pipeline.timeline)
    pipeline.close()
    return found


def _collectives(costs, stages, device):
    """Reductions and an optimizer step that take their time on the device, where they take any."""
    values, options = torch.zeros(1, device=device), {}
    own, lane = torch.accelerator.current_stream(device), torch.Stream(device)

    def reduce_stage(stage):
        lane.wait_stream(own)
        with lane:
            slow(values, costs.reduce_s[stage])

    def optimizer_step():
        own.wait_stream(lane)
        slow(values, sum(costs.optimizer_s[stage] for stage in stages))

    if any(costs.reduce_s):
        options["reduce_stage"] = reduce_stage
    if any(costs.optimizer_s):
        options["optimizer_step"] = optimizer_step
    return options


def _step(pipeline, plan, *, record=False):
    batch = torch.ones(plan.num_microbatches, WIDTH, device=pipeline.device, requires_grad=True)
    pipeline.step(batch, target=batch.detach(), record=record)
