"""`Pipeline`: the object that a training loop holds; the same lines on one process and on many.

The program is planned once: the schedule is built (or read), proved, lowered and proved again before the first step. A
step is then one agreement between the ranks, one run of this rank's instructions, and one exchange of losses.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from penstock.construction import construct
from penstock.construction_plan import Plan
from penstock.errors import ConfigError, PenstockError, PipelineError
from penstock.execute.batch.local_batch import StepRequest
from penstock.execute.control.agreement import Extra, Mode
from penstock.execute.joining import join
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.model_loss import with_model_loss
from penstock.execute.losses.results import StepResult
from penstock.execute.model_part import ModelPart
from penstock.execute.observing.memory_report import MemoryReport, MemoryWatch, gather_memory
from penstock.execute.observing.recorder import Recording
from penstock.execute.rank_parameters import Unit
from penstock.execute.stages.layers import Layer
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.calls import CLOSE, collective
from penstock.execute.transport.device_queue import device_queue_of
from penstock.execute.transport.places import Places
from penstock.garbage import garbage_left
from penstock.ir.timeline import Timeline
from penstock.partition.split import ParameterCounts, describe_split
from penstock.planning import ScheduleLike, predict_peaks
from penstock.tables import Screen


class Pipeline(ModelPart):
    """A model split over ranks, run by a schedule.

    `layers`: modules, or callables that build one (`LayerSpec`); those of the own stages are used in place. `schedule`:
    a name, a `Schedule`, a `Program`, or the path of a file. `microbatches`: 8 for a name, else what the schedule is
    for. `loss`: takes the output and the target of a microbatch, and returns one loss, a dict of named ones, a sum with
    its weight, or a `LossOutput`; by default it is that of a model of `from_transformers`, with its `count`. `split`:
    layers per stage. `process_group`: the ranks, all of them if None. `ranks`: how many there must be; 1 without a
    group is a model of its own in this process. `mesh`: in place of a group, the ranks of a pipeline and of its
    replicas, a `DeviceMesh` with the dimensions `pipeline` and `data`, of which one may be missing. Further keywords
    are those of `PipelineOptions`, then options of the schedule's family.

    Replicas are one job. Each is given rows of its own, whole on each of its ranks. Losses, gradients and their norm
    are those of one process on the rows of all replicas, one replica after another. All start with the parameters and
    buffers of the first one, and end a step with its buffers. With `shard` they share out weights, gradients and
    optimizer state: parameters are DTensors then, of which each replica has some rows.

    All ranks are those of torch's default group. Where torchrun started the processes and there is no default group,
    the first pipeline makes it: with gloo, and with NCCL for a CUDA `device`. The last pipeline that is closed destroys
    it. As a context manager, a pipeline closes itself.

    Gradients accumulate in `.grad` until the caller zeroes them. With two routes every stage has a copy on another
    rank, whose parameters start equal and end every step with the same total in `.grad`: whoever changes a parameter
    does the same to it on both ranks, as every optimizer does. With slices, layers must treat each position of the
    sequence alone, or carry what they need of earlier slices in a `ps.Carry`.

    Raises:
        ScheduleError, PartitionError, ConfigError: if the schedule, the split or a setting is wrong.
        PipelineError: if the ranks were not set up alike.
        On the other ranks a ConfigError with that rank's words, where something is wrong on one only.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        schedule: ScheduleLike = "1f1b",
        microbatches: int | None = None,
        loss: Loss | None = None,
        *,
        stages_per_rank: int | None = None,
        split: Sequence[int] | None = None,
        process_group: dist.ProcessGroup | None = None,
        ranks: int | None = None,
        mesh: DeviceMesh | Places | None = None,
        **options: Any,
    ) -> None:
        """Join the other ranks, plan the program with them, and build the stages of this rank.

        Every rank makes its pipeline, with the same arguments; the class says what they are. A rank on which this fails
        leaves the other ranks, so that none of them waits for it.
        """
        # Connect to the other ranks. Wrong arguments are raised later, on all ranks together.
        loss, options = with_model_loss(layers, loss, options)
        joined = join(process_group, options, ranks, mesh)
        make_plan = partial(
            Plan,
            joined,
            layers,
            schedule,
            microbatches=microbatches,
            loss=loss,
            stages_per_rank=stages_per_rank,
            split=split,
        )
        # Plan, prove and build together; `construct` calls `make_plan` on every rank.
        with joined.leaving_on_failure():
            self._runner, self._reports = construct(joined, make_plan)
        # What users read of a pipeline.
        self._session = session = self._runner.session
        self._assembly = session.assembly
        self.options, self.device, self.schedule = session.options, session.device, session.schedule
        self.program = session.program
        self.stages: list[Stage] = session.assembly.stages
        self.transport, self.control = joined.transport, joined.control
        # Calls of ranks are compared by the number of the pipeline. A rank that was interrupted while it made one has
        # counted fewer pipelines than the others, so all take the largest count.
        num_pipelines = 1 + max(session.agreed.each("num_pipelines"))
        self.control.pipeline_number = self.control.calls.num_pipelines = num_pipelines
        places = joined.places
        self.rank, self.replica, self.num_replicas = places.pipeline.rank, places.replica, places.num_replicas

    def __enter__(self) -> Self:
        """Return the pipeline, which is closed at the end of the block, also by an error."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self.control.calls.entering(
            CLOSE if kind is None else kind.__name__, pipeline=self.control.pipeline_number
        ):
            self.close()

    # ---- the calls of a training loop

    @collective
    def step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: int | None = None,
        return_outputs: bool | Collection[int] = False,
        record: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward of one batch; the same call on every rank.

        Every rank passes the whole batch, or nothing where it needs none: the first stage of a route takes `args`, the
        last one `target`, and a keyword reaches every layer that can take it. A model that `cut` or `from_transformers`
        made layers of takes them as its own forward does. A `Stream`, passed alone, brings them one microbatch after
        another, each pulled when it is needed. With `return_outputs` the outputs of all routes are on the rank of the
        first route's last stage, or on the ranks that it names. `record` measures the step (`timeline`).

        `microbatches` cuts this batch into another number of them than the pipeline's: alike on every rank that is
        given a part of the batch. A family is planned for it, and a schedule that was given whole runs in rounds.

        Raises:
            PipelineError: on every rank, if the step fails on any. The next step may be run after it; until then
                gradients hold a part of the failed batch, so zero them.
        """
        request = StepRequest(args, kwargs, target, return_outputs, _extra(record), microbatches)
        return self._runner.run(Mode.TRAIN, request)

    def no_sync(self, *, tied: bool = True) -> AbstractContextManager[None]:
        """Within it, steps add up gradients and reduce none over replicas: of a mesh, in DDP or in `reduce_stage`.

        For all steps before an optimizer step but the last; every rank enters it for the same steps. Without `tied`,
        those of tied parameters are not summed over their ranks either: for steps whose gradients are thrown away.
        """
        return self._session.parameters.no_sync(tied=tied)

    @collective
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        microbatches: int | None = None,
        return_outputs: bool | Collection[int] = False,
        record: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run the forwards of one batch without gradients, layers in evaluation mode; it changes nothing.

        A batch may have any number of rows: fewer than microbatches make a microbatch each. `microbatches` may be any
        number, as in `step`.
        """
        request = StepRequest(args, kwargs, target, return_outputs, _extra(record), microbatches)
        return self._runner.run(Mode.EVALUATE, request)

    def refuse(self, error: PenstockError, mode: Mode = Mode.TRAIN) -> NoReturn:
        """Refuse the step that the other ranks begin now, because this rank cannot run it; they are told why.

        So are ranks that make another call of all ranks instead, such as `memory_report` or `save_checkpoint`.

        Raises:
            StepRefused: on every rank; the next step may be run.
        """
        # In the place of the call that the other ranks make, and so by its name.
        with self.control.calls.entering(mode.value, error, pipeline=self.control.pipeline_number):
            self._runner.run(mode, StepRequest(refusal=error))
        raise AssertionError("a refused step does not run")

    def profile(
        self,
        *args: Any,
        target: Any = None,
        microbatches: int | None = None,
        split_backwards: bool = False,
        **kwargs: Any,
    ) -> Timeline:
        """Run one training step and return its measured timeline, the same on every rank.

        `split_backwards` runs every whole backward as its two parts, one right after the other, to measure them.
        `microbatches` is that of `step`.
        """
        mode = self._training_mode(split_backwards=split_backwards)
        # A recorded step, and so by its name: other ranks may call step(record=True).
        with self.control.calls.entering(Mode.TRAIN.value, pipeline=self.control.pipeline_number):
            self._runner.run(mode, StepRequest(args, kwargs, target, extra=Extra.RECORDING, microbatches=microbatches))
        if self.timeline is None:
            text = "the step ran, but was not recorded: the log (logger penstock) of a rank says why"
            raise self._runner.error(text)
        return self.timeline

    @collective
    def memory_report(
        self,
        *args: Any,
        target: Any = None,
        microbatches: int | None = None,
        optimizer: Optimizer | None = None,
        split_backwards: bool = False,
        **kwargs: Any,
    ) -> MemoryReport:
        """Run one training step and return what every rank held meanwhile, the same on every rank.

        `microbatches` is that of `step`, `split_backwards` that of `profile`; `optimizer` is this rank's. On a GPU,
        torch's peak counters are reset.
        """
        queue, parameters = device_queue_of(self.transport), self._session.parameters
        memory = MemoryWatch(self.stages, self.device, optimizer, queue, parameters)
        mode = self._training_mode(split_backwards=split_backwards)
        request = StepRequest(args, kwargs, target, extra=Extra.MEMORY, microbatches=microbatches)
        with garbage_left():
            result = self._runner.run(mode, request, memory)
        program, layers = self._runner.program, self.layers_of_stage
        predict = partial(predict_peaks, program, layers, shards=self.num_replicas if self.options.is_sharded else 1)
        return gather_memory(self.transport, memory, result, predict)

    @collective
    def find_not_finite(self, *args: Any, target: Any = None, microbatches: int | None = None, **kwargs: Any) -> str:
        """Run one training step and say where its first value that is not finite was made; empty if all are finite.

        The text names rank, stage, microbatch and tensor, the same on every rank. A gradient that was not finite before
        the step is named as such, instead of what the step makes. Gradients hold a part of the batch afterwards, so
        zero them, before this call too. It waits for the device at every value, which takes time. `microbatches` is
        that of `step`.

        Raises:
            PipelineError: on every rank, if the step fails for another reason.
        """
        try:
            self._runner.run(
                Mode.TRAIN, StepRequest(args, kwargs, target, extra=Extra.VALUES, microbatches=microbatches)
            )
        except PipelineError as error:
            if not error.finding:
                raise
            return error.finding
        return ""

    @property
    def timeline(self) -> Timeline | None:
        """The measured timeline of the last recorded step, the same on every rank; its `save` writes a file."""
        return None if self.recording is None else self.recording.timeline

    @property
    def recording(self) -> Recording | None:
        """The measurements of the last recorded step, on every rank."""
        return self._runner.recording

    @property
    def step_number(self) -> int:
        """The number of training steps that have succeeded, from which the next one draws with `seed`.

        Set it, on all ranks alike, to go on where another pipeline stopped.
        """
        return self._runner.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._runner.step_number = number

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks that compute losses, and so take the target: those that hold the last stage of a route."""
        placement = self.schedule.placement
        return tuple(sorted({placement.rank_of_stage[route[-1]] for route in placement.routes}))

    @property
    def layers_of_stage(self) -> Sequence[range]:
        """Per stage, its layers; with two routes, those of both copies."""
        return self._session.layers_of_stage

    @property
    def layer_weights(self) -> Sequence[float]:
        """The relative cost per layer that the split went by."""
        return self._session.layer_weights

    @property
    def units(self) -> Sequence[Unit]:
        """The parameters of this rank: those of each stage, of stages that share some together, and how they lie."""
        return self._session.parameters.units

    def describe_split(self, *, width: int | None = None) -> str:
        """Draw which stage has which layers, its share of the weight, and its parameters, each once per rank.

        Last lines name the stages that hold parameters of another stage, on their rank or as copies on another one.
        After a recorded step that splits backwards, also which share of its weight gradients waits for W, and why
        others do not. Where parameters are frozen, a line says which stages train how many. `width` is the number of
        columns to fit; without it, nothing is folded or left out.
        """
        early = {} if self.recording is None else self.recording.early_weights
        return describe_split(
            self.layers_of_stage,
            self._session.layer_names,
            self.layer_weights,
            ParameterCounts.of_ranks([report["parameters"] for report in self._reports]),
            Screen(width),
            late_shares={stage: 1 - weights.share for stage, weights in early.items()},
            reasons={stage: weights.reasons for stage, weights in early.items()},
            splits_backwards=bool(self.schedule.split_stages),
        )

    @collective
    def close(self) -> None:
        """End the watchdog and close the connections; the modules stay as they are, but no step can be run any more.

        It waits for no rank. Ranks that wait for this one in another call are told that it has left.
        """
        self._runner.close()

    def _training_mode(self, *, split_backwards: bool) -> Mode:
        """Return the mode of a training step. Raises: ConfigError, where backwards may not be split on some rank."""
        if not split_backwards:
            return Mode.TRAIN
        for report in self._reports:
            if report["unsplittable"]:
                raise ConfigError(report["unsplittable"])
        return Mode.TRAIN_SPLIT


def _extra(record: bool) -> Extra:
    return Extra.RECORDING if record else Extra.NOTHING
