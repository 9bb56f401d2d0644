"""For users of torchtitan: a whole model and lists of module names per stage become the stages of each rank.

docs/moving/torchtitan.md describes what differs, and what can be deleted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.execute.control.handshake import require_equal
from penstock.ir.schedule import Schedule as Order
from penstock.moving.model_parts import ModelParts
from penstock.moving.own_stages import AnySchedule, PipelineMaker, require_parts
from penstock.moving.stage_agreement import parts_of_stages
from penstock.moving.torch_pipelining import PipelineStage, Schedule, family_of, translate_options
from penstock.partition.split import split_layers


class Pipelined(NamedTuple):
    """All that a training loop of torchtitan holds; it unpacks into these four, too."""

    pp_schedule: Schedule
    model_parts: list[nn.Module]
    """This rank's parts, by stage; their parameters have the whole model's names."""
    pp_has_first_stage: bool
    pp_has_last_stage: bool


def pipeline_llm(
    model: nn.Module,
    module_fqns_per_model_part: Sequence[Sequence[str]],
    schedule: AnySchedule = "1F1B",
    n_microbatches: int | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    prepare: Callable[[nn.Module], nn.Module | None] | None = None,
    **options: Any,
) -> Pipelined:
    """Cut a model into parts by the names of its modules, and pipeline them; every rank calls it.

    `module_fqns_per_model_part` lists the names of modules of each part, in order. `schedule` is torch's name or ours,
    a `penstock.Schedule`, or the path of a CSV file. The model, which may be on the meta device, stays as it is: a rank
    copies what its own stages need. `prepare(part)` is called with each part of this rank before it is used (to give it
    memory and values, compile or shard it), and may return another module in its place. Parameters that several parts
    hold are tied. A bidirectional schedule has every part on two ranks. Further keywords are those of
    `torch_pipelining.Schedule`.

    Raises:
        ConfigError, PartitionError: the names do not fit the model or the schedule; on every rank alike.
    """
    parts = ModelParts(model, module_fqns_per_model_part)
    maker = PipelineMaker.of(group, translate_options(options))
    # All ranks make the schedule, and must have passed the same names of modules.
    order, facts_by_rank = maker.joined.exchange(
        lambda: _order(maker, schedule, n_microbatches, parts.num_stages),
        lambda _: {"module_fqns_per_model_part": str(list(map(list, module_fqns_per_model_part)))},
    )
    require_equal(facts_by_rank)
    part_of_stage = parts_of_stages(order.placement)
    local_stages = order.placement.stages_of_rank[maker.transport.rank]
    modules = {stage: parts.make(part_of_stage[stage]) for stage in local_stages}
    if prepare is not None:
        modules = {stage: prepare(part) or part for stage, part in modules.items()}
    stages = [PipelineStage(part, stage, order.num_stages, device, group=group) for stage, part in modules.items()]
    tied = [*maker.options.get("tied", ()), *parts.tied()]
    schedule_options = {**maker.options, "tied": tied, **maker.connection}
    pp_schedule = Schedule(order, stages, loss_fn=loss_fn, **schedule_options)
    return Pipelined(
        pp_schedule,
        list(modules.values()),
        pp_has_first_stage=any(stage.is_first for stage in stages),
        pp_has_last_stage=any(stage.is_last for stage in stages),
    )


def _order(maker: PipelineMaker, schedule: AnySchedule, num_microbatches: int | None, num_parts: int) -> Order:
    """Return the schedule for a model of so many parts. Raises: ConfigError, where it runs another number."""
    family_or_schedule = family_of(schedule)
    order = maker.schedule(family_or_schedule, num_microbatches, maker.stages_per_rank(family_or_schedule, num_parts))
    require_parts(order, num_parts, "module_fqns_per_model_part")
    return order


def generate_llm_fqn_per_model_part(
    num_stages: int, num_layers: int, input_weight: float = 1, output_weight: float = 1
) -> list[list[str]]:
    """Divide a decoder with torchtitan's names evenly over stages; embedding and output weigh like so many layers.

    Raises:
        PartitionError: more stages than modules.
    """
    names = ["tok_embeddings", *[f"layers.{index}" for index in range(num_layers)], "norm", "output"]
    weights = [input_weight, *[1.0] * num_layers, 0.0, output_weight]
    return [[names[index] for index in part] for part in split_layers(len(names), num_stages, weights=weights)]
