"""torch's own pipelines, made from the same layers: what the benches measure Penstock against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A schedule of torch, and the options with which Penstock's family has the same order."""

    made: Any
    takes_one_stage: bool = False
    options: dict[str, Any] = field(default_factory=dict)


COUNTERPARTS = {
    "gpipe": Counterpart(ScheduleGPipe, True),
    "1f1b": Counterpart(Schedule1F1B, True),
    "zb-h1": Counterpart(ScheduleInterleavedZeroBubble),
    "interleaved-1f1b": Counterpart(ScheduleInterleaved1F1B),
    "looped-bfs": Counterpart(ScheduleLoopedBFS, options={"backward_order": "descending"}),
    "interleaved-zb": Counterpart(ScheduleInterleavedZeroBubble),
    "zbv": Counterpart(ScheduleZBVZeroBubble),
    "dualpipe-v": Counterpart(ScheduleDualPipeV),
}
"""By family."""


def torch_step(
    family: str,
    schedule: Schedule,
    layers: Sequence[nn.Module],
    layers_of_stage: Sequence[range],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    mesh: DeviceMesh | None = None,
    wrap: Callable[[nn.Module], object] = nn.Module.requires_grad_,
    **options: Any,
) -> Callable[[Tensor, Tensor], None]:
    """Return one step of torch's schedule on this rank, of a batch and its target.

    `layers` holds those of this rank's stages at least, which are used in place. torch must order as `schedule` does.
    The ranks are those of the dimension `pipeline` where there is a mesh. `wrap` is called with the module of each
    stage, as `fully_shard` may be. `options` are those of torch's `step`.
    """
    rank, num_stages = dist.get_rank() if mesh is None else mesh.get_local_rank("pipeline"), schedule.num_stages
    group = None if mesh is None else mesh.get_group("pipeline")
    own = schedule.placement.stages_of_rank[rank]
    modules = [nn.Sequential(*(layers[index] for index in layers_of_stage[stage])) for stage in own]
    for module in modules:
        wrap(module)
    pairs, device = zip(modules, own, strict=True), torch.device("cpu")
    stages = [PipelineStage(*each, num_stages, device, group=group) for each in pairs]
    counterpart = COUNTERPARTS[family]
    given = stages[0] if counterpart.takes_one_stage else stages
    runtime = counterpart.made(given, schedule.num_microbatches, loss_fn=loss)
    check_order(runtime, family, schedule)

    def step(batch: Tensor, target: Tensor) -> None:
        inputs = [batch] if 0 in own else []
        wanted = {"target": target} if num_stages - 1 in own else {}
        runtime.step(*inputs, **wanted, **options)

    return step


def check_order(runtime: Any, family: str, schedule: Schedule) -> None:
    """End the bench where torch would not order as the schedule does; its 1F1B is a loop without a written order."""
    if family == "1f1b":
        return
    rows = runtime.pipeline_order.items()
    theirs = {rank: [str(action) for action in row if action is not None] for rank, row in rows}
    for rank, row in theirs.items():
        ours = [str(action) for action in schedule[rank]]
        found = [text for text in row if "REDUCE_GRAD" not in text]
        if found != ours:
            raise SystemExit(f"{family}: torch's order of rank {rank} is {found}, Penstock's {ours}")
