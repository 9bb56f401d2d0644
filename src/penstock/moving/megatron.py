"""For users of Megatron-LM: a `forward_step_func`, run by any schedule of Penstock.

A call of the `ForwardBackward` that `get_forward_backward_func` returns takes what Megatron's functions take, and
returns what they return. docs/moving/megatron.md describes what differs, and what can be deleted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import ConfigError, described, nearest
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.control.agreement import Mode
from penstock.execute.losses.grad_scaler import grad_scaler_of
from penstock.execute.losses.loss import Scale
from penstock.execute.losses.results import MicrobatchLosses, StepResult
from penstock.ir.operations import RUNS_FORWARD
from penstock.ir.schedule import Schedule
from penstock.moving.own_stages import AnySchedule, PipelineMaker
from penstock.moving.pass_timers import TAKES_INPUTS, PassTimers, Timers
from penstock.moving.stage_agreement import parts_of_stages
from penstock.moving.step_stage import CountTokens, ForwardStep, RoutePlace, StepCall, StepLoss, StepStage
from penstock.pipeline import Pipeline

MAX_PIPELINES = 2
"""How many pipelines stay for later calls: for training, and for an evaluation of another number of microbatches."""

_UNUSED_ARGUMENTS = (
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "p2p_communicator",
    "pg_collection",
    "force_all_reduce",
)
"""Megatron's functions take these to know shapes and peers beforehand; here the first batch and the group say both."""

_SLICES = (
    "it cuts microbatches into slices, but a forward step takes whole ones off its data iterator; use a schedule "
    "without slices"
)


_StagedPipeline = tuple[Pipeline, list[StepStage]]
"""A pipeline over some model parts, and the stages through which they are called."""


class ForwardBackward:
    """A function like Megatron's `forward_backward_func`; the first call makes the pipeline, later ones use it again.

    `schedule`: any of Penstock's; by default `1f1b` for one model part per rank, `interleaved-1f1b` for several.
    `count_tokens(data)` says how many tokens one item of the data iterator holds that count for the loss. With it, a
    loss function returns the sum over tokens and their number, and gradients are those of the mean over all tokens of
    the batch; the rank of the last stage then pulls the whole batch ahead. `num_microbatches` is that of calls which do
    not say it. Further keywords are those of `Pipeline`, `mesh` too: each replica then has data iterators of its own.
    """

    def __init__(
        self,
        schedule: AnySchedule | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        count_tokens: CountTokens | None = None,
        num_microbatches: int | None = None,
        **options: Any,
    ) -> None:
        self._schedule = schedule
        self._group = group
        self._count_tokens = count_tokens
        self._num_microbatches = num_microbatches
        self._timers = PassTimers()
        self._scale_loss: Scale | None = None
        """The `scale_loss` of the last call's optimizer."""
        # The optimizer comes with a call, and the pipeline stays for later ones.
        scale_loss = self._scaled if options.get("scale_loss") is None else options["scale_loss"]
        self._options = {**options, "scale_loss": scale_loss}
        if options.get("slices") not in (None, 1) or (isinstance(schedule, Schedule) and schedule.num_slices > 1):
            raise ConfigError(_SLICES, key="schedule")
        self._pipelines: dict[tuple[int, ...], _StagedPipeline] = {}
        self.result: StepResult | None = None
        """The result of the last call's step: its loss is on every rank."""

    def __call__(
        self,
        forward_step_func: ForwardStep,
        data_iterator: Any,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        timers: Timers | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        *,
        num_microbatches: int | None = None,
        **unneeded: Any,
    ) -> list[Any]:
        """Run one batch; return what the loss function reported of each microbatch, on the rank of the last stage.

        The arguments are those of Megatron-LM's forward-backward functions, by position those of its older ones, and
        `unneeded` those of them that are ignored. Losses are scaled by the method `scale_loss` of `optimizer`, if it
        has one, where their backward begins; it must be the same on all ranks. `timers("forward-compute", log_level=2)`
        and `timers("backward-compute", log_level=2)` are started and stopped around every pass. `model` and
        `data_iterator` are one each, or lists with one entry per model part of this rank; the iterator of a part whose
        forward step takes no data may be None. `forward_only` runs without gradients, with modules in evaluation mode.
        With `collect_non_loss_data` the list holds `loss_func(output, non_loss_data=True)`.

        Raises:
            ConfigError: on every rank, if the arguments do not fit each other; after a call that did, a StepRefused.
            PipelineError: on every rank, if the step fails on any.
        """
        models = list(model) if isinstance(model, (nn.ModuleList, Sequence)) else [model]
        number = self._num_microbatches if num_microbatches is None else num_microbatches
        # Without a number, the rank still meets the others, to tell them of it.
        call_number = self._last_number() if number is None else number
        call = StepCall(forward_step_func, [], call_number, forward_only, collect_non_loss_data)
        problem: ConfigError | None = None
        scale_loss = getattr(optimizer, "scale_loss", None)
        self._scale_loss = scale_loss
        self._timers.use(timers)
        try:
            _require_number(number)
            _require_timers(timers)
            self._refuse_second_scale(scale_loss)
            _refuse_unknown_arguments(unneeded, call)
            call.iterators = _iterators_of_models(data_iterator, len(models))
            self._refuse_other_shards(self._key(models, call_number))
        except ConfigError as error:
            problem = error  # all ranks raise it together in `_run_batch`; else the other ranks would wait for this one
        pipeline, stages = self._pipeline_for(models, call.num_microbatches, problem)
        problem = problem or _problem_of_groups(unneeded.get("pg_collection"), pipeline.schedule.num_ranks)
        return self._run_batch((pipeline, stages), call, problem)

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of the last call; None before the first."""
        return next((pipeline for pipeline, _ in reversed(self._pipelines.values())), None)

    def close(self) -> None:
        """Close the connections of all pipelines made so far."""
        for pipeline, _ in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()

    def _key(self, models: Sequence[nn.Module], num_microbatches: int) -> tuple[int, ...]:
        """Return under what a pipeline that can run a call is kept: its sizes, whether it has timers, and its parts."""
        timed_key, key = ((num_microbatches, is_timed, *map(id, models)) for is_timed in (True, False))
        return timed_key if self._timers.timers is not None or timed_key in self._pipelines else key

    def _refuse_other_shards(self, key: tuple[int, ...]) -> None:
        """Refuse a second pipeline of model parts that are sharded by a first one. Raises: ConfigError."""
        if self.pipeline is None or not self.pipeline.options.is_sharded or key in self._pipelines:
            return
        if any(key[2:] == other_key[2:] for other_key in self._pipelines):
            raise ConfigError(
                f"{key[0]}, but the shards of the weights belong to the pipeline of batches of {self._last_number()}"
                f"{', made without timers' * key[1]}; give as many, timers in the first call if any, or no shard",
                key="num_microbatches",
            )

    def _last_number(self) -> int:
        """Return the number of microbatches of the last call; 1 before the first."""
        return 1 if self.pipeline is None else self.pipeline.schedule.num_microbatches

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return a loss as the optimizer of the call scales it."""
        return loss if self._scale_loss is None else self._scale_loss(loss)

    def _refuse_second_scale(self, scale_loss: Any) -> None:
        """Refuse a `scale_loss` of an optimizer beside that of the constructor, or of torch's. Raises: ConfigError."""
        if scale_loss is not None and self._options["scale_loss"] != self._scaled:
            raise ConfigError(
                "has a scale_loss, and get_forward_backward_func was given one, too; give one of them", key="optimizer"
            )
        if grad_scaler_of(scale_loss) is not None:
            raise ConfigError(
                "has a scale_loss of torch.amp.GradScaler, which decides on each rank alone; give "
                "get_forward_backward_func(scale_loss=scaler.scale)",
                key="optimizer",
            )

    def _pipeline_for(
        self, models: Sequence[nn.Module], num_microbatches: int, problem: ConfigError | None
    ) -> _StagedPipeline:
        """Return the pipeline of these model parts and microbatches, made anew where no recent call had them.

        Nothing stands around the passes of calls before the first one with timers. The pipeline of that one serves
        calls without timers, too.
        """
        key = self._key(models, num_microbatches)
        staged_pipeline = self._pipelines.pop(key, None) or self._make_pipeline(models, num_microbatches, problem)
        self._pipelines[key] = staged_pipeline  # the last used comes last
        while len(self._pipelines) > MAX_PIPELINES:
            pipeline, _ = self._pipelines.pop(next(iter(self._pipelines)))
            pipeline.close()
        return staged_pipeline

    def _make_pipeline(
        self, models: Sequence[nn.Module], num_microbatches: int, problem: ConfigError | None
    ) -> _StagedPipeline:
        """Make the pipeline of these model parts; every rank calls it, even with a problem, which all then raise."""
        # The target of a microbatch is the number of its tokens (`StepStage.loss_targets`), so it is its own count.
        count = None if self._count_tokens is None else float
        options = dict(self._options)
        if self._timers.timers is not None:
            options["observers"] = [*options.get("observers", ()), self._timers]
        maker = PipelineMaker.of(self._group, {"count": count, **options})
        schedule = maker.joined.together(lambda: self._make_schedule(maker, models, num_microbatches, problem))
        stage_indices = schedule.placement.stages_of_rank[maker.transport.rank]
        part_of_stage, route_length = parts_of_stages(schedule.placement), len(schedule.placement.routes[0])
        places = [RoutePlace(part_of_stage[stage], route_length, part) for part, stage in enumerate(stage_indices)]
        loss = StepLoss()
        stages = maker.joined.together(
            lambda: [
                StepStage(part, place, self._count_tokens, step_loss=loss)
                for part, place in zip(models, places, strict=True)
            ]
        )
        return maker.pipeline(dict(zip(stage_indices, stages, strict=True)), schedule, loss), stages

    def _make_schedule(
        self, maker: PipelineMaker, models: Sequence[nn.Module], num_microbatches: int, problem: ConfigError | None
    ) -> Schedule:
        if problem is not None:
            raise problem
        default = "1f1b" if len(models) == 1 else "interleaved-1f1b"
        schedule = maker.schedule(self._schedule or default, num_microbatches, len(models))
        _require_order(schedule)
        if len(schedule.placement.routes) > 1 and self._count_tokens is not None:
            raise ConfigError(
                f"{schedule.name} has two routes, each with a last stage on a rank of its own, and neither sees the "
                "tokens of all microbatches; drop it, or use a schedule with one route",
                key="count_tokens",
            )
        stage_indices = schedule.placement.stages_of_rank[maker.transport.rank]
        if len(stage_indices) != len(models):
            raise ConfigError(
                f"{len(models)} parts, but {schedule.name} places the stages {list(stage_indices)} on rank "
                f"{maker.transport.rank}; bring one part for each",
                key="model",
            )
        return schedule

    def _run_batch(self, staged_pipeline: _StagedPipeline, call: StepCall, problem: ConfigError | None) -> list[Any]:
        pipeline, stages = staged_pipeline
        if problem is not None:
            pipeline.refuse(problem, Mode.EVALUATE if call.is_forward_only else Mode.TRAIN)
        target: PreSplit | None = None
        for stage in stages:
            stage.begin(call)
            if stage.place.is_last:
                target = PreSplit(stage.loss_targets())
        try:
            # Both draw their batch from the data iterators: the pipeline itself passes the number of a microbatch only.
            run_pipeline = pipeline.evaluate if call.is_forward_only else pipeline.step
            result = run_pipeline(target=target, microbatch=PreSplit(range(call.num_microbatches)))
        finally:
            for stage in stages:
                stage.end()
        self.result = result
        if call.collects_non_loss_data:
            self.result = replace(result, loss=None, losses=MicrobatchLosses(), total=None)
        return result.reported


get_forward_backward_func = ForwardBackward
"""Megatron's name of the function that makes one."""


def _require_number(num_microbatches: int | None) -> None:
    if num_microbatches is None:
        raise ConfigError("is in neither the call nor get_forward_backward_func(...)", key="num_microbatches")


def _require_timers(timers: object) -> None:
    if timers is not None and not callable(timers):
        raise ConfigError(f"{described(timers)}; expected a function of a timer's name, or None", key="timers")


def _refuse_unknown_arguments(unneeded: Iterable[str], call: StepCall) -> None:
    for name in unneeded:
        if name not in _UNUSED_ARGUMENTS:
            raise ConfigError(f"is nothing that this function takes.{nearest(name, _UNUSED_ARGUMENTS)}", key=name)
    if call.collects_non_loss_data and not call.is_forward_only:
        raise ConfigError(
            "works with forward_only=True alone: without a loss there is no backward", key="collect_non_loss_data"
        )


def _problem_of_groups(pg_collection: Any, num_ranks: int) -> ConfigError | None:
    """Return what is wrong where Megatron's groups are for other pipelines than the one that runs."""
    pp_size = getattr(getattr(pg_collection, "pp", None), "size", None)
    if not callable(pp_size) or pp_size() == num_ranks:
        return None
    return ConfigError(
        f"its pp has {pp_size()} ranks, but this pipeline {num_ranks}; give get_forward_backward_func(group=...) that "
        "group, or mesh=",
        key="pg_collection",
    )


def _iterators_of_models(data_iterator: Any, num_models: int) -> list[Any]:
    if not isinstance(data_iterator, (list, tuple)):
        if data_iterator is not None and num_models > 1:
            raise ConfigError(f"one for {num_models} model parts; give a list of one per part", key="data_iterator")
        return [data_iterator] * num_models
    if len(data_iterator) != num_models:
        raise ConfigError(
            f"a list of {len(data_iterator)} for {num_models} model parts; give one iterator per part",
            key="data_iterator",
        )
    return list(data_iterator)


def _require_order(schedule: Schedule) -> None:
    """Data iterators give each microbatch once, one after another, so every stage must take them so, and whole."""
    if schedule.num_slices > 1:
        raise ConfigError(_SLICES, key="schedule")
    is_forward = TAKES_INPUTS[schedule.kind]
    if (RUNS_FORWARD[schedule.kind] & ~is_forward).any():
        raise ConfigError(
            f"{schedule.name} runs forwards again (R), but a forward step has taken its item off the data iterator by "
            "then; use a schedule without recompute, and torch.utils.checkpoint within your layers",
            key="schedule",
        )
    for stage in range(schedule.num_stages):
        microbatches = schedule.microbatch[is_forward & (schedule.stage == stage)]
        if (np.diff(microbatches) < 0).any():
            raise ConfigError(
                f"stage {stage} of {schedule.name} takes the microbatches in the order {microbatches.tolist()}, but "
                "data iterators give them in ascending order; use another schedule",
                key="schedule",
            )
