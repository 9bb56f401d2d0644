"""`Splits`: the problems of one placement, for any layers of its stages and any stages that recompute.

    layers        0    1    2    3    4
                  |_________|____|____|       split 2, 1, 1 ... a stage is a range of layers
    stages          0         1    2          seconds[plane, 0, 2]: what stage 0 takes
                       *                      its forwards run again: I takes a forward longer, F keeps its input only

A forward that runs again (R) comes right before its I, so the search counts both as one action. Simulated, R may begin
before the gradient has come: the plan that is proved at the end is no longer than that.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.operations import Kind
from penstock.placement import Placement
from penstock.searching.fitting import Split, largest_of_ranges, sums_of_ranges
from penstock.searching.problem import FORWARD, INPUT, NUM_PLANES, Bytes, Problem, room_bytes
from penstock.searching.sequences import Columns
from penstock.simulation.costs.costs import STATIC_BYTES, Costs
from penstock.simulation.costs.layer_costs import LayerCosts

UNIT_BYTES = 1 << 20
"""The size of a message by which the seconds of a byte are found."""


class Ranges(NamedTuple):
    """What a stage with the layers from `start` up to `stop` takes and holds, by whether it recomputes."""

    seconds: Any
    """[2, planes, start, stop] seconds of F, I and W, without factors of microbatches and launches."""
    taken_bytes: Any
    """[2, planes, start, stop] bytes that its rank holds from the action's start on."""
    freed_bytes: Any
    """[2, planes, start, stop] bytes that its rank frees at the action's end."""
    static_bytes: Any
    """[start, stop] bytes that are always there."""
    output_bytes: Any
    """[stop] bytes of the message behind the last layer before `stop`; 0 where there is none."""
    seconds_factor: Any
    """[num_microbatches] the times that a microbatch takes the usual seconds."""
    bytes_factor: Any
    """[num_microbatches] the times that a microbatch takes the usual bytes."""
    lag_s_per_byte: Any
    """[num_actions] seconds of lag that a byte of the action's source adds."""
    wire_s_per_byte: Any
    """[num_actions] seconds that a byte of the action's result takes on its serialized link."""
    latency_s: Any
    """[num_actions] seconds of lag of an empty message."""
    launch_s: float


@dataclass(frozen=True)
class Splits:
    """The problems of a placement for splits of layers."""

    layer_costs: LayerCosts
    placement: Placement
    num_microbatches: int
    most_bytes: Bytes | None
    """[num_ranks] the bytes that a rank may hold, what is always there included; None: without a limit."""

    def costs_of(self, split: Split) -> Costs:
        """Return the costs of the stages of a split."""
        return self.layer_costs.of_stages(split)

    def problem_of(self, split: Split, recomputed: tuple[int, ...] = (), most_bytes: Bytes | None = None) -> Problem:
        """Return the problem of a split in which some stages recompute; `most_bytes` may be less than the limit."""
        costs = self.costs_of(split)
        problem = Problem.of(self.placement, self.num_microbatches, costs)
        if self.most_bytes is not None:
            sizes = costs.stage_bytes(self.placement, self.num_microbatches)
            limit = self.most_bytes if most_bytes is None else most_bytes
            problem = replace(problem, limit=limit - sizes.static_of_ranks(self.placement))
        names = ("seconds", "taken_bytes", "freed_bytes", "lag_s", "wire_s")
        filled: dict[str, Any] = {name: getattr(problem, name).copy() for name in names}
        columns = Columns.of(problem)._replace(**filled)
        starts = np.cumsum([0, *split]).tolist()
        for stage, (start, stop) in enumerate(pairwise(starts)):
            fill_stage(self.ranges, columns, stage, start, stop, int(stage in recomputed))
        filled["room_bytes"] = room_bytes(columns.rank, columns.taken_bytes, columns.freed_bytes)
        return replace(problem, **filled, recomputed_stages=recomputed)

    @cached_property
    def ranges(self) -> Ranges:
        """What every range of layers takes and holds."""
        costs, num_layers = self.layer_costs, self.layer_costs.num_layers
        per_layer = costs.of_stages([1] * num_layers)
        durations = per_layer.durations_s(num_layers, range(num_layers))
        forward, inputs, weight, again = (
            sums_of_ranges(durations[kind])
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)
        )
        sizes = per_layer.stage_bytes(Placement.line(num_layers), self.num_microbatches)
        activation, context = sums_of_ranges(sizes.activation), sums_of_ranges(sizes.weight_context)
        # A stage keeps what its first layer takes.
        checkpoint = np.append(sizes.checkpoint, 0)[:, None] + np.zeros_like(activation)
        forward_bytes = largest_of_ranges(sizes.forward_workspace.astype(np.float64))
        backward_bytes = largest_of_ranges(sizes.backward_workspace.astype(np.float64))
        again_bytes = np.maximum(forward_bytes, backward_bytes)
        empty, full = (
            Problem.of(
                self.placement,
                self.num_microbatches,
                replace(costs, message_bytes=(num_bytes,)).of_stages(self.even_split),
            )
            for num_bytes in (0, UNIT_BYTES)
        )
        return Ranges(
            seconds=np.array([[forward, inputs, weight], [forward, inputs + again, weight]]),
            taken_bytes=np.array(
                [
                    [activation + forward_bytes, backward_bytes, backward_bytes],
                    [checkpoint + forward_bytes, activation - checkpoint + again_bytes, backward_bytes],
                ],
                np.float64,
            ),
            freed_bytes=np.array(
                [
                    [forward_bytes, activation - context + backward_bytes, context + backward_bytes],
                    [forward_bytes, activation - context + again_bytes, context + backward_bytes],
                ],
                np.float64,
            ),
            static_bytes=self._static_bytes(),
            output_bytes=np.concatenate([[0.0], sizes.message]),
            seconds_factor=per_layer.per_microbatch("microbatch_compute_factor", self.num_microbatches),
            bytes_factor=per_layer.per_microbatch("microbatch_bytes_factor", self.num_microbatches),
            lag_s_per_byte=(full.lag_s - empty.lag_s) / UNIT_BYTES,
            wire_s_per_byte=(full.wire_s - empty.wire_s) / UNIT_BYTES,
            latency_s=empty.lag_s,
            launch_s=float(costs.launch_s),
        )

    def _static_bytes(self) -> NDArray[np.int64]:
        """Return [start, stop] bytes that are always there, of which replicas may store a share each."""
        costs, count = self.layer_costs, self.layer_costs.num_layers
        of_layers = sum(np.array(costs.spread_out(name, count, "layer"), np.int64) for name in STATIC_BYTES)
        return np.asarray(-(-sums_of_ranges(np.asarray(of_layers)) // costs.shards))

    @property
    def even_split(self) -> Split:
        num_stages = self.placement.num_stages
        rest = self.layer_costs.num_layers - num_stages + 1
        return (rest, *[1] * (num_stages - 1))


def fill_stage(ranges: Ranges, columns: Columns, stage: int, start: int, stop: int, recomputes: int) -> None:
    """Fill in what the actions of a stage take that has these layers, and what its messages take.

    A list schedule breaks ties by sums of seconds: only columns with the same last digits give the same one again. So
    all columns come from here, in compiled code and outside of it.
    """
    num_microbatches = len(ranges.seconds_factor)
    num_stages = len(columns.rank) // num_microbatches // NUM_PLANES
    for plane in range(NUM_PLANES):
        seconds = ranges.seconds[recomputes, plane, start, stop]
        taken_bytes = ranges.taken_bytes[recomputes, plane, start, stop]
        freed_bytes = ranges.freed_bytes[recomputes, plane, start, stop]
        launches = 1 + recomputes if plane == INPUT else 1
        # An F takes the output of the stage before, and sends its own; an I takes and sends the gradients of these.
        received = ranges.output_bytes[start if plane == FORWARD else stop]
        sent = ranges.output_bytes[stop if plane == FORWARD else start]
        for microbatch in range(num_microbatches):
            action = (plane * num_stages + stage) * num_microbatches + microbatch
            factor = ranges.bytes_factor[microbatch]
            columns.seconds[action] = seconds * ranges.seconds_factor[microbatch] + launches * ranges.launch_s
            columns.taken_bytes[action] = round(taken_bytes * factor)
            columns.freed_bytes[action] = round(freed_bytes * factor)
            columns.lag_s[action] = ranges.latency_s[action] + received * ranges.lag_s_per_byte[action]
            columns.wire_s[action] = sent * ranges.wire_s_per_byte[action]
