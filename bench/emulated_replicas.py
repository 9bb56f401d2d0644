"""Stages that sleep in place of work, with exchanges between replicas that take a given time: for bench/replicas.py.

Stages are uneven, and so are their weights. What a rank receives from the other replica takes `LATENCY_S` and its bytes
at `BYTES_PER_S`, one message after another, beside the sleeping rank. So gathers and reductions take as long as costs
between replicas say, and nothing of them needs the machine.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from emulated_layer import EmulatedLayer
from on_ranks import REST_S, SEED
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from penstock.execute.replicas.mesh import connect_mesh
from penstock.execute.transport.protocol import Tag, Ticket, Transport
from penstock.ir.timeline import Timeline
from penstock.pipeline import Pipeline
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.costs.fit import costs_from_timelines
from penstock.simulation.costs.replicas import of_replicas

RANKS, REPLICAS, STAGES_PER_RANK, MICROBATCHES = 2, 2, 4, 4
FORWARD_S, BACKWARD_S = 0.010, 0.020
"""Of a mean stage and a microbatch."""
ELEMENTS = 10_000
"""Of the weights of a mean stage."""
LATENCY_S, BYTES_PER_S = 0.001, 2e6
FAMILY = "interleaved-1f1b"
SETTINGS = [(residency, look_ahead) for residency in (1, 2, None) for look_ahead in (0, 1, 2)]
DEADLINE_S = 60.0
NUM_WARM_UP_STEPS, NUM_FITTED = 2, 3


class EmulatedLink:
    """A transport whose received data take a time of their own, one message after another."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._free_s = 0.0
        self._ends_s: dict[int, float] = {}
        """By the serial number of a ticket, when its message may be there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post_receive(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        ticket = self._transport.post_receive(peer, tensor, tag)
        if tag is Tag.DATA:
            begin_s = max(time.perf_counter(), self._free_s)
            self._free_s = self._ends_s[ticket.serial] = begin_s + LATENCY_S + tensor.nbytes / BYTES_PER_S
        return ticket

    def wait(self, ticket: Ticket, limit_s: float | None = None) -> None:
        self._transport.wait(ticket, limit_s)
        end_s = 0.0 if ticket.is_send else self._ends_s.pop(ticket.serial, 0.0)
        time.sleep(max(end_s - time.perf_counter(), 0.0))


class WeightedLayer(EmulatedLayer):
    """One with weights to be gathered."""

    def __init__(self, forward_s: float, backward_s: float, num_elements: int) -> None:
        super().__init__(forward_s, backward_s)
        self.ballast = nn.Parameter(torch.zeros(num_elements))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features + self.ballast.sum())


def measured(num_steps: int, settings: Sequence[tuple[int | None, int]] = SETTINGS) -> Iterator[dict[str, Any]]:
    """Measure and simulate every setting on this rank; all ranks get the same rows."""
    schedule = build(FAMILY, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=STAGES_PER_RANK)
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("data", "pipeline"))
    batch = torch.zeros(MICROBATCHES, 4, 1)
    for residency, look_ahead in settings:
        places, _ = connect_mesh(mesh, DEADLINE_S)
        places = replace(places, data=EmulatedLink(places.data))
        sharding: dict[str, Any] = {"shard": "full", "residency": residency, "look_ahead": look_ahead}
        loss = nn.functional.mse_loss
        with closing(
            Pipeline(layers_of(schedule.num_stages), schedule, loss=loss, mesh=places, **sharding)
        ) as pipeline:
            timelines: list[Timeline] = []
            for _ in range(NUM_WARM_UP_STEPS + NUM_FITTED + num_steps):
                time.sleep(REST_S)
                timelines.append(pipeline.profile(batch, target=batch))
            program, stages = pipeline.program, pipeline.stages
            own = {str(stage.index): sum(each.numel() * 4 for each in stage.parameters()) for stage in stages}
            sizes = pipeline.control.all_gather_object(own)
        num_bytes = {stage: size for row in sizes for stage, size in row.items()}  # type: ignore[attr-defined]
        recorded, counted = timelines[NUM_WARM_UP_STEPS:][:NUM_FITTED], timelines[-num_steps:]
        fitted = costs_from_timelines(recorded)
        costs = with_exchanges(fitted, [num_bytes[str(stage)] for stage in range(schedule.num_stages)])
        seconds, simulated_s = [timeline.step_s for timeline in counted], simulate(program, costs).step_s
        yield {
            "residency": residency,
            "look_ahead": look_ahead,
            "seconds": seconds,
            "simulated_s": simulated_s,
            "ratio": statistics.median(seconds) / simulated_s,
            "gather_fitted_over_given": statistics.median(np.divide(fitted.unshard_s, costs.unshard_s).tolist()),
        }


def layers_of(num_stages: int) -> list[nn.Module]:
    """One uneven layer per stage."""
    chance = random.Random(SEED)
    factors = [(chance.uniform(0.8, 1.2), chance.uniform(0.5, 1.5)) for _ in range(num_stages)]
    return [WeightedLayer(time * FORWARD_S, time * BACKWARD_S, int(size * ELEMENTS)) for time, size in factors]


def with_exchanges(costs: Costs, num_bytes: Sequence[int]) -> Costs:
    """Let gathers and reductions take what they take on an `EmulatedLink`."""
    link = {"replica_latency_s": LATENCY_S, "replica_bandwidth_bytes_per_s": BYTES_PER_S}
    sizes = {"parameter_bytes": tuple(num_bytes), "gradient_bytes": tuple(num_bytes)}
    plain = replace(costs, unshard_s=(0.0,), reduce_s=(0.0,), **link, **sizes)  # type: ignore[arg-type]
    return of_replicas(plain, REPLICAS, is_sharded=True)
