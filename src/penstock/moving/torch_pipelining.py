"""For users of `torch.distributed.pipelining`: its stages, its schedule classes and its `step`, run by Penstock.

Change the import and keep the rest. docs/moving/torch-pipelining.md says what differs and what can be deleted.
"""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import ConfigError, PipelineError, described, nearest
from penstock.execute.batch.microbatch import BatchSpec, Concat, Split
from penstock.execute.control.agreement import Mode
from penstock.execute.losses.results import StepResult
from penstock.ir.schedule import Schedule as Order
from penstock.moving.own_stages import AnySchedule, PipelineMaker
from penstock.placement import Placement
from penstock.schedules import FAMILIES, is_family_name

FAMILY_OF_CLASS = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipe-v",
}
"""torch's names of schedules, and the families here that run the same orders."""

_IGNORED_ARGUMENTS = ("input_args", "output_args", "output_grads", "input_grads", "get_mesh")
"""torch's stage takes these to learn shapes; here the first batch says them."""
_NO_EFFECT = ("backward_requires_autograd", "defer_pp_recv")


class PipelineStage:
    """One stage of this rank: `submodule` is stage `stage_index` of `num_stages`.

    Examples of inputs and outputs are taken and ignored: shapes follow from the first batch. `dw_builder` is called
    after each backward of the stage, and returns the function that computes its weight gradients, which runs in `W`.

    Raises:
        ConfigError: a keyword that torch does not have, or a `dw_builder` that cannot be called.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[[], Any]] | None = None,
        **example_arguments: Any,
    ) -> None:
        """Keep the arguments; nothing is built or sent before a `Schedule` takes the stage.

        `dw_builder` is kept on `submodule`, as its attribute, where a backward that is split into I and W looks for it.
        """
        # Refuse arguments that torch's stage does not take either.
        if dw_builder is not None and not callable(dw_builder):
            raise ConfigError(f"{described(dw_builder)}; expected a function that returns one", key="dw_builder")
        if dw_builder is not None:
            cast(Any, submodule).dw_builder = dw_builder
        for name in example_arguments:
            if name not in _IGNORED_ARGUMENTS:
                raise ConfigError(f"is nothing that a stage takes.{nearest(name, _IGNORED_ARGUMENTS)}", key=name)
        # The attributes of torch's stage, under its names.
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = None if device is None else torch.device(device)
        self.group = group
        self.is_first = stage_index == 0
        """Whether this stage takes the batch. `Schedule` sets it anew: a bidirectional schedule has two such stages."""
        self.is_last = stage_index == num_stages - 1
        """Whether this stage computes losses. `Schedule` sets it anew, as it does `is_first`."""

    def update_ends(self, placement: Placement) -> None:
        """Set `is_first` and `is_last` by where the routes of a schedule begin and end."""
        self.is_first = placement.previous_stage[self.stage_index] < 0
        self.is_last = placement.next_stage[self.stage_index] < 0


class Schedule:
    """A schedule over the stages that the ranks bring, stepped as torch's are.

    `schedule`: torch's name in any case, a name of Penstock's, a `penstock.Schedule`, the path of a schedule file, or a
    class of yours that is derived from torch's `PipelineScheduleSingle` or `PipelineScheduleMulti`.
    `stage`: this rank's stage, or the list of them. A stage takes a tuple or list from the one before as
    several arguments. Further keywords are those of torch's classes, then those of `penstock.Pipeline`.

    Raises:
        ConfigError, PartitionError: if stages, schedule and options do not fit each other; on every rank alike.
    """

    def __init__(
        self,
        schedule: AnySchedule,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Agree with all ranks on the schedule, and make the pipeline of the stages' modules; every rank calls it.

        `n_microbatches` and `loss_fn` are torch's; without `loss_fn`, `step` evaluates.
        """
        stages = list(stage) if isinstance(stage, Sequence) else [stage]
        # Anything but a stage in the list is refused by `_order`, on all ranks together: if this rank raised here, the
        # other ranks would wait for it.
        first_stage = next((local_stage for local_stage in stages if isinstance(local_stage, PipelineStage)), None)
        if first_stage is not None and first_stage.device is not None:
            options.setdefault("device", first_stage.device)
        maker = PipelineMaker.of(None if first_stage is None else first_stage.group, translate_options(options))
        # All ranks agree on one schedule, or raise the same error.
        order = maker.joined.together(lambda: self._order(maker, schedule, stages, n_microbatches))
        self._loss_fn = loss_fn
        self._loss_keywords: Mapping[str, Any] = {}
        """Further arguments of `loss_fn` in the step that runs."""
        for local_stage in stages:
            local_stage.update_ends(order.placement)
        # The placement now says which stages are first and last.
        self._computes_losses = any(local_stage.is_last for local_stage in stages)
        modules = {local_stage.stage_index: local_stage.submod for local_stage in stages}
        self.pipeline = maker.pipeline(modules, order, None if loss_fn is None else self._loss)
        # A tuple that arrives from the stage before is unpacked into arguments, as torch does. A module may be several
        # stages; it gets one hook.
        receivers = {id(local_stage.submod): local_stage.submod for local_stage in stages if not local_stage.is_first}
        self._hooks = [module.register_forward_pre_hook(_unpack, with_kwargs=True) for module in receivers.values()]
        self.result: StepResult | None = None
        """The result of the last step: its loss is on every rank."""

    @staticmethod
    def _order(
        maker: PipelineMaker,
        schedule: AnySchedule,
        stages: Sequence[PipelineStage],
        num_microbatches: int | None,
    ) -> Order:
        """Return the schedule for the stages of this rank, once they are checked. Raises: ConfigError."""
        _require_stages(stages)
        order = maker.schedule(family_of(schedule), num_microbatches, len(stages))
        if order.num_stages != stages[0].num_stages:
            raise ConfigError(
                f"{stages[0].num_stages} stages are given, but {order.name} on {order.num_ranks} ranks with "
                f"{len(stages)} each has {order.num_stages}",
                key="num_stages",
            )
        return order

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train on one batch; return the merged outputs on the rank of the last stage, None on all other ranks.

        The rank of the first stage passes inputs, that of the last one the target. `losses` is filled with the loss of
        each microbatch, in order, on every rank that gives a list. `loss_kwargs` are passed to the loss function.
        Without a loss function, the batch is evaluated, as by `eval`.

        Raises:
            PipelineError: on every rank, if the step fails on any.
        """
        if self._loss_fn is None:
            return self.eval(*args, target=target, losses=losses, **kwargs)
        self._loss_keywords = loss_kwargs or {}
        if target is None and self._computes_losses:
            text = f"rank {self.pipeline.rank} computes the losses and was given no target; pass target=..."
            self.pipeline.refuse(PipelineError(text), Mode.TRAIN)
        result = self.pipeline.step(*args, target=target, return_outputs=return_outputs, **kwargs)
        return self._outputs(result, losses)

    def eval(self, *args: Any, target: Any = None, losses: MutableSequence[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the forwards of one batch without gradients, modules in evaluation mode; returns as `step` does."""
        if self._loss_fn is None and not (target is None and losses is None):
            argument = "losses" if target is None else "target"
            problem = "is given, but the schedule was made without a loss_fn; give it one"
            self.pipeline.refuse(ConfigError(problem, key=argument), Mode.EVALUATE)
        result = self.pipeline.evaluate(*args, target=target, return_outputs=True, **kwargs)
        return self._outputs(result, losses)

    def close(self) -> None:
        """Release the transport, and leave the modules as they were given."""
        for hook in self._hooks:
            hook.remove()
        self.pipeline.close()

    def _outputs(self, result: StepResult, losses: MutableSequence[Tensor] | None) -> Any:
        """Return the outputs of a step, as `step` does, and put its losses into the caller's list."""
        self.result = result
        if losses is not None:
            losses.clear()
            losses.extend(result.losses)
        return result.outputs

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self._loss_fn is not None
        return self._loss_fn(output, target, **self._loss_keywords)


class _NamedSchedule(Schedule):
    """A schedule whose class says which it is."""

    family: ClassVar[str]

    def __init_subclass__(cls, family: str) -> None:
        cls.family = family

    def __init__(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(self.family, stage, n_microbatches, loss_fn, **options)


class ScheduleGPipe(_NamedSchedule, family="GPipe"):
    """torch's GPipe."""


class Schedule1F1B(_NamedSchedule, family="1F1B"):
    """torch's 1F1B."""


class ScheduleInterleaved1F1B(_NamedSchedule, family="Interleaved1F1B"):
    """torch's interleaved 1F1B, with several stages per rank."""


class ScheduleLoopedBFS(_NamedSchedule, family="LoopedBFS"):
    """torch's breadth-first order, with several stages per rank."""


class ScheduleInterleavedZeroBubble(_NamedSchedule, family="InterleavedZeroBubble"):
    """torch's interleaved 1F1B with split backwards."""


class ScheduleZBVZeroBubble(_NamedSchedule, family="ZBVZeroBubble"):
    """torch's ZBV, with two stages per rank."""


class ScheduleDualPipeV(_NamedSchedule, family="DualPipeV"):
    """torch's DualPipeV, with two stages per rank."""


def get_schedule_class(schedule_name: str) -> type[Schedule]:
    """Return the class of schedules of this name, which is made as torch's class of that name is.

    Raises:
        ConfigError: for a name that neither torch nor Penstock has.
    """
    family = family_of(schedule_name)
    for named_schedule in _NamedSchedule.__subclasses__():
        if family_of(named_schedule.family) == family:
            return named_schedule
    if family not in FAMILIES:
        names = [*FAMILY_OF_CLASS, *FAMILIES]
        raise ConfigError(
            f"there is no schedule {schedule_name!r}; known: {', '.join(names)}.{nearest(schedule_name, names)}"
        )
    return type(f"Schedule {family}", (_NamedSchedule,), {}, family=family)


def family_of(schedule: AnySchedule) -> AnySchedule:
    """Return the family of a schedule of torch's name; all else stays as it is."""
    if not is_family_name(schedule):
        return schedule
    family_by_name = {name.lower(): family for name, family in FAMILY_OF_CLASS.items()}
    return family_by_name.get(schedule.lower().removeprefix("schedule"), schedule)


def _require_stages(stages: Sequence[PipelineStage]) -> None:
    """Refuse stages of a rank that do not fit each other. Raises: ConfigError."""
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            problem = f"is a {type(stage).__name__}; expected a PipelineStage, or a list of them"
            raise ConfigError(problem, key="stage")
    if not stages:
        raise ConfigError("this rank brings no stage; every rank holds at least one", key="stage")
    if len({stage.num_stages for stage in stages}) > 1:
        counts = ", ".join(f"{stage.num_stages} by stage {stage.stage_index}" for stage in stages)
        raise ConfigError(f"{counts}; give all stages the same", key="num_stages")
    for stage in stages:
        if not 0 <= stage.stage_index < stage.num_stages:
            raise ConfigError(
                f"{stage.stage_index}; expected 0 to {stage.num_stages - 1} of {stage.num_stages}", key="stage_index"
            )
    indices = [stage.stage_index for stage in stages]
    if len(set(indices)) < len(indices):
        raise ConfigError(f"{indices} on one rank; bring each stage once", key="stage_index")


def translate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `Pipeline` that do what these keywords of torch's schedules do."""
    translated = {name: value for name, value in options.items() if name not in _NO_EFFECT}
    args, keywords = translated.pop("args_chunk_spec", None), translated.pop("kwargs_chunk_spec", None)
    if args is not None or keywords is not None:
        translated.setdefault("specs", BatchSpec(args=_marks(args, Split), kwargs=_marks(keywords, Split)))
    merge = translated.pop("output_merge_spec", None)
    if merge is not None:
        translated.setdefault("merge", _marks(merge, Concat))
    if not translated.pop("scale_grads", True):
        translated.setdefault("reduction", "sum")
    return translated


def _marks(spec: Any, mark_of_dim: Callable[[int], Any]) -> Any:
    """Turn torch's `TensorChunkSpec`s, which have a `split_dim`, into Penstock's marks, which stay where they are used.

    `spec` is one or a tree of them; `mark_of_dim` makes a mark: `Split` for inputs, `Concat` for outputs.
    """
    if isinstance(spec, Mapping):
        return {name: _marks(item, mark_of_dim) for name, item in spec.items()}
    if isinstance(spec, (tuple, list)):
        marks = tuple(_marks(item, mark_of_dim) for item in spec)
        return marks[0] if mark_of_dim is Concat and len(marks) == 1 else marks
    return mark_of_dim(spec.split_dim) if hasattr(spec, "split_dim") else spec


def _unpack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a stage as torch does: a tuple or list from the stage before it becomes several arguments."""
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0]), kwargs
    return args, kwargs
