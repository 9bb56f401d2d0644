"""Schedules that a user has written as a class for another system: the class becomes a table of actions.

DeepSpeed's `PipeSchedule` yields instructions, which are read. The schedules of torch.distributed.pipelining, and of
PiPPy before it, call their stages, so `_step_microbatches` runs once per rank, on stages that note what they are asked.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.ir.schedule import Schedule
from penstock.moving.deepspeed_schedule import is_pipe_schedule, rows_of_pipe_schedule
from penstock.schedules.third_party import as_schedule, require_sizes, run_third_party

_SEVERAL_STAGES = "PipelineScheduleMulti"
_RUN = "_step_microbatches"
MAX_PER_MICROBATCH = 3
"""Passes of a stage for one microbatch: a forward, and a backward in one or two parts."""
_FULL_BACKWARD = 2
"""The position of `full_backward` among the arguments of torch's `backward_one_chunk`."""


def schedule_of_class(schedule: type, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Return the schedule that a class describes: a subclass of `PipeSchedule`, or of torch's or PiPPy's schedules.

    A `PipeSchedule`, and torch's `PipelineScheduleSingle`, have one stage per rank. Of several, stage s is on rank
    s % `ranks`, unless the class says by its `stage_index_to_group_rank` where it is.

    Raises:
        ConfigError: a class of another kind, one that fails, or one that makes no schedule of these sizes.
    """
    name = schedule.__name__
    has_several = any(base.__name__ == _SEVERAL_STAGES for base in schedule.__mro__)
    if stages_per_rank not in (None, 1) and not has_several:
        raise ConfigError(f"{name} has one stage per rank, got {stages_per_rank} here; bring one", key="schedule")
    if is_pipe_schedule(schedule):
        rows = run_third_party(name, lambda: rows_of_pipe_schedule(schedule, ranks, microbatches))
    elif hasattr(schedule, _RUN):
        num_stages = ranks * (stages_per_rank or 1)
        recorder = _Recorder(schedule, ranks, num_stages, microbatches, has_several_stages=has_several)
        rows = run_third_party(name, recorder.rows)
    else:
        raise ConfigError(
            f"{name} has neither steps() of DeepSpeed's PipeSchedule nor {_RUN}() of torch's schedules; give such a "
            "class, the name of a family, a penstock.Schedule, or the path of a file",
            key="schedule",
        )
    table = as_schedule(rows, name, num_ranks=ranks)
    sizes = {"ranks": ranks, "stages": ranks * (stages_per_rank or 1), "microbatches": microbatches, "slices": 1}
    require_sizes(name, table, sizes)
    return table


class _Recorder:
    """Runs a schedule of torch's form once per rank, and keeps what its stages are asked for."""

    def __init__(
        self, schedule: type, num_ranks: int, num_stages: int, num_microbatches: int, *, has_several_stages: bool
    ) -> None:
        self._schedule = schedule
        self._num_ranks = num_ranks
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._has_several_stages = has_several_stages

    def rows(self) -> list[list[str]]:
        """Return the actions of every rank. Raises: whatever the schedule raises."""
        looped = {stage: stage % self._num_ranks for stage in range(self._num_stages)}
        # A schedule that places stages in another way, such as a V, says so only when it has been made with some.
        rank_of_stage = getattr(self._made(0, looped, []), "stage_index_to_group_rank", looped)
        return [self._row(rank, rank_of_stage) for rank in range(self._num_ranks)]

    def _row(self, rank: int, rank_of_stage: dict[int, int]) -> list[str]:
        row: list[str] = []
        number = self._num_microbatches
        self._made(rank, rank_of_stage, row)._step_microbatches(
            arg_mbs=[()] * number, kwarg_mbs=[{}] * number, target_mbs=[None] * number, losses=[]
        )
        return row

    def _made(self, rank: int, rank_of_stage: dict[int, int], row: list[str]) -> Any:
        """Return the schedule of one rank, over stages that write into `row`."""
        stages = [
            _RecordingStage(stage, rank, self, row) for stage, owner in sorted(rank_of_stage.items()) if owner == rank
        ]
        return self._schedule(
            stages if self._has_several_stages else stages[0], self._num_microbatches, loss_fn=_zero_loss
        )


class _RecordingStage:
    """Notes the passes that a schedule asks a stage for; all else that torch's stages have does nothing.

    Its outputs and losses are zeros. It has no messages, so a schedule never waits.
    """

    def __init__(self, stage_index: int, rank: int, recorder: _Recorder, row: list[str]) -> None:
        self.stage_index = stage_index
        self.num_stages = recorder._num_stages
        self.is_first = stage_index == 0
        self.is_last = stage_index == self.num_stages - 1
        self.group_size = recorder._num_ranks
        self.group_rank = rank
        self.group = None
        self.device = torch.device("cpu")
        self.submod = nn.Identity()
        self.has_backward = True
        self.output_chunks: list[Tensor] = []
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self._num_microbatches = recorder._num_microbatches
        self._row = row
        self._num_passes = {"F": 0, "B": 0, "W": 0}

    def forward_one_chunk(self, *args: Any, **keywords: Any) -> Tensor:
        """Note a forward; PiPPy's stages count their microbatches themselves, torch's are told the number."""
        self._note("F", "F", args, keywords)
        return torch.zeros(())

    def backward_one_chunk(self, *args: Any, full_backward: bool = True, **keywords: Any) -> None:
        """Note a backward, or its part that computes the gradient of the input."""
        is_whole = args[_FULL_BACKWARD] if len(args) > _FULL_BACKWARD else full_backward
        self._note("B", "B" if is_whole else "I", args, keywords)

    def backward_weight_one_chunk(self, *args: Any, **keywords: Any) -> None:
        """Note the part of a backward that computes the gradients of weights."""
        self._note("W", "W", args, keywords)

    def get_fwd_recv_ops(self, *args: Any) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _get_init_p2p_neighbors_ops = get_fwd_recv_ops

    def clear_runtime_states(self, *args: Any, **keywords: Any) -> None:
        """Do nothing."""

    scale_grads = perform_reduce_grad = set_local_fwd_input = set_local_bwd_input = clear_runtime_states
    get_local_bwd_output = _prepare_forward_infra = _prepare_backward_infra = clear_runtime_states

    def _note(self, counter: str, kind: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        count = self._num_passes[counter]
        self._num_passes[counter] += 1
        if sum(self._num_passes.values()) > MAX_PER_MICROBATCH * self._num_microbatches:
            raise ConfigError(
                f"stage {self.stage_index} is asked for more than {MAX_PER_MICROBATCH} passes of each of "
                f"{self._num_microbatches} microbatches; let {_RUN}() end",
                key="schedule",
            )
        number = args[0] if args else keywords.get("fwd_chunk_id" if counter == "F" else "bwd_chunk_id")
        self._row.append(f"{self.stage_index}{kind}{number if isinstance(number, Integral) else count}")


def _zero_loss(*args: Any, **keywords: Any) -> Tensor:
    return torch.zeros(())
