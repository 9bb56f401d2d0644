"""`Pipeline`: the object that a training loop holds; the same lines on one process and on many.

What runs is planned once: the schedule is built (or read), proved, lowered and proved again before the first step. A
step is then one agreement between the ranks, one run of this rank's instructions, and one exchange of losses.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from penstock.errors import ConfigError, PenstockWarning, PipelineError
from penstock.execute.arguments import (
    layer_list,
    names_of_children,
    require_loss,
    require_schedule,
    require_slices,
    require_split,
)
from penstock.execute.batch.agreement import Mode, agree_on_setup
from penstock.execute.batch.gate import Call
from penstock.execute.joining import Joined, join
from penstock.execute.losses.grad_scaler import describe_scale, grad_scaler_of
from penstock.execute.losses.loss import Loss, LossWeights, loss_scale
from penstock.execute.losses.results import StepResult
from penstock.execute.model_part import ModelPart
from penstock.execute.observing.memory_report import MemoryReport, MemoryWatch, gather_memory
from penstock.execute.observing.recorder import Recording
from penstock.execute.options import refuse_unknown
from penstock.execute.runner import Runner
from penstock.execute.stages.assemble import (
    Layer,
    assemble,
    count_parameters,
    layer_names,
    spec_attribute,
    with_skips,
)
from penstock.execute.stages.carried import refuse_layers_that_look_back
from penstock.execute.stages.main_gradients import require_shapes
from penstock.execute.stages.shared_builders import BuiltLayers, build_own, gather_shared_names
from penstock.execute.stages.stage import Stage
from penstock.execute.stages.tied import agree_on_copies
from penstock.execute.stages.wrappers import refuse_wrappers, reshard, unsplittable
from penstock.execute.transport.protocol import Transport
from penstock.execute.world import default_device, shares_process
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.split_backwards import with_split_backwards
from penstock.ir.timeline import Timeline
from penstock.partition.split import describe_split, split_over
from penstock.planning import (
    ScheduleLike,
    few_microbatches,
    memory_demand,
    options_of_family,
    predict_peaks,
    prove_and_lower,
    resolve_plan,
)
from penstock.schedules import find_family, is_family_name
from penstock.version import VERSION

_LOOKING_BACK = (nn.MultiheadAttention, nn.RNNBase)
"""What is known to need more of the sequence than the slice at hand, and cannot carry it by itself."""


class Pipeline(ModelPart):
    """A model split over ranks, run by a schedule.

    `layers`: modules, or callables that build one (`LayerSpec`); those of the own stages are used in place. `schedule`:
    a name, a `Schedule`, a `Program`, or the path of a file. `microbatches`: 8 for a name, else what the schedule is
    for. `loss`: takes the output and the target of a microbatch, and returns one loss, a dict of named ones, a sum with
    its weight, or a `LossOutput`. `split`: layers per stage. `process_group`: the ranks, the default group if None;
    it may be given as `group` too, where a whole number is the option `group` of the schedule's family. Further
    keywords are those of `PipelineOptions`, then options of the schedule's family.

    Gradients accumulate in `.grad` until the caller zeroes them. With two routes every stage has a copy on another
    rank, whose parameters start equal and end every step with the same total in `.grad`: whoever changes a parameter
    does the same to it on both ranks, as every optimizer does. With slices, layers must treat each position of the
    sequence alone, or carry what they need of earlier slices in a `penstock.models.Carry`.

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
        group: dist.ProcessGroup | int | None = None,
        **options: Any,
    ) -> None:
        joined = join(process_group, group, options, options_of_family(schedule))
        self.options, self._family_options = joined.options, joined.family_options
        self._transport = joined.transport
        self.rank = self._transport.rank
        self._has_main_gradients = self.options.main_gradients
        self._loss = loss
        self._is_closed = False
        with joined.leaving_on_failure():
            # What is wrong on one rank only, such as a layer that cannot be built there, must not let the others wait.
            built = joined.together(lambda: self._plan(joined, layers, schedule, microbatches, stages_per_rank, split))
            shared = gather_shared_names(self._transport, built)
            joined.together(lambda: self._assemble(joined, built, shared))
            self._set_up_together()
            self._runner = self._make_runner()
        advice = few_microbatches(self.program)
        if advice is not None and self.rank == 0:
            warnings.warn(advice, PenstockWarning, stacklevel=2)

    # ---- the calls of a training loop

    def step(
        self, *args: Any, target: Any = None, return_outputs: bool = False, record: bool = False, **kwargs: Any
    ) -> StepResult:
        """Run forward and backward of one batch; the same call on every rank.

        Every rank passes the whole batch, or nothing where it needs none: the first stage of a route takes `args`, the
        last one `target`, and a keyword reaches every layer that can take it. A `Stream`, passed alone, brings
        them one microbatch after another, each pulled when it is needed. Outputs of both routes go to the
        rank of the first route's last stage. `record` measures the step (`timeline`).

        Raises:
            PipelineError: on every rank, if the step fails on any. The next step may be run after it; until then
                gradients hold a part of the failed batch, so zero them.
        """
        return self._train(Mode.TRAIN, Call(args, kwargs, target, return_outputs, record))

    def evaluate(
        self, *args: Any, target: Any = None, return_outputs: bool = False, record: bool = False, **kwargs: Any
    ) -> StepResult:
        """Run the forwards of one batch without gradients, layers in evaluation mode; it changes nothing.

        A batch may have any number of rows: fewer than microbatches make a microbatch each.
        """
        # Per submodule: a user may keep some of them, such as a frozen BatchNorm, in evaluation mode while training.
        layers = [layer for stage in self.stages for layer in stage.layers.values()]
        modes = [(module, module.training) for layer in layers for module in layer.modules()]
        for stage in self.stages:
            stage.set_training(False)
        try:
            return self._run(Mode.EVALUATE, Call(args, kwargs, target, return_outputs, record))
        finally:
            for module, mode in modes:
                module.training = mode
            reshard(self.stages)

    def profile(self, *args: Any, target: Any = None, split_backwards: bool = False, **kwargs: Any) -> Timeline:
        """Run one training step and return its measured timeline, the same on every rank.

        `split_backwards` runs every whole backward as its two parts, one right after the other, to measure them.
        """
        mode = Mode.TRAIN_SPLIT if split_backwards else Mode.TRAIN
        self._train(mode, Call(args, kwargs, target, record=True))
        if self.timeline is None:
            text = "the step ran, but was not recorded: the log (logger penstock) of a rank says why"
            raise PipelineError(f"rank {self.rank}: {text}", rank=self.rank)
        return self.timeline

    def memory_report(
        self,
        *args: Any,
        target: Any = None,
        optimizer: Optimizer | None = None,
        split_backwards: bool = False,
        **kwargs: Any,
    ) -> MemoryReport:
        """Run one training step and return what every rank held meanwhile, the same on every rank.

        `optimizer` is this rank's; `split_backwards` is that of `profile`. On CUDA, torch's peak counters are reset.
        """
        memory = MemoryWatch(self.stages, self.device, optimizer)
        mode = Mode.TRAIN_SPLIT if split_backwards else Mode.TRAIN
        result = self._train(mode, Call(args, kwargs, target), memory)
        program, layers = self._program_of(mode, self.schedule.num_microbatches), self._layers_of_stage
        return gather_memory(self._transport, memory, result, lambda sizes: predict_peaks(program, layers, sizes))

    @property
    def timeline(self) -> Timeline | None:
        """The measured timeline of the last recorded step, on every rank."""
        return None if self.recording is None else self.recording.timeline

    @property
    def recording(self) -> Recording | None:
        """What was measured in the last recorded step, on every rank."""
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
    def layers_of_stage(self) -> Sequence[range]:
        """Per stage, its layers; with two routes, those of both copies."""
        return self._layers_of_stage

    @property
    def layer_weights(self) -> Sequence[float]:
        """The relative cost per layer that the split went by."""
        return self._weights

    @property
    def transport(self) -> Transport:
        """The wires to the other ranks."""
        return self._transport

    def describe_split(self) -> str:
        """Draw which stage has which layers, its share of the weight, and its parameters, copies of tied ones too."""
        names, counts = list(self._num_parameters), list(self._num_parameters.values())
        return describe_split(self._layers_of_stage, names, self._weights, counts)

    def close(self) -> None:
        """End the watchdog and release the wires; the modules stay as they are, but no step can be run any more."""
        self._is_closed = True
        self._runner.close()

    # ---- planning

    def _plan(
        self,
        joined: Joined,
        layers: Sequence[Layer],
        schedule: ScheduleLike,
        microbatches: int | None,
        stages_per_rank: int | None,
        split: Sequence[int] | None,
    ) -> BuiltLayers:
        """Decide what runs and build this rank's layers; no message to another rank."""
        device = self.options.device
        self.device = default_device(joined.process_group) if device is None else torch.device(device)
        require_loss(self._loss)
        self._loss_weights = LossWeights(self.options.reduction, self.options.count)
        loss_scale(self.options.scale_loss)  # refuses what scales nothing
        self._given = self._resolve(schedule, microbatches, stages_per_rank)
        self.schedule = self._given.actions()
        require_split(split)
        listed = layer_list(layers)
        self._layer_names = layer_names(listed, names_of_children(layers))
        self._split(listed, split)
        own_stages = self.schedule.placement.stages_of_rank[self.rank]
        own = dict.fromkeys(index for stage in own_stages for index in self._layers_of_stage[stage])
        return build_own(listed, self._layer_names, list(own))

    def _resolve(
        self, schedule: ScheduleLike, microbatches: int | None, stages_per_rank: int | None
    ) -> Schedule | Program:
        require_schedule(schedule)
        family_options = self._family_options
        if is_family_name(schedule):
            refuse_unknown(family_options, schedule, find_family(schedule).all_options)
            if self.options.slices is not None:
                family_options["slices"] = self.options.slices
        resolved = resolve_plan(
            schedule,
            ranks=self._transport.num_ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            options=family_options,
        )
        require_slices(resolved, self.options.slices)
        return resolved

    def _split(self, layers: Sequence[Layer], split: Sequence[int] | None) -> None:
        weights = self.options.weights
        if split is not None and weights is not None:
            raise ConfigError("split says already which stage gets how many layers; pass one of the two", key="weights")
        if weights is None:
            weights = [float(spec_attribute(layer, "weight", 1.0)) for layer in layers]
        self._weights = weights
        self._layers_of_stage = split_over(self.schedule.placement, len(layers), weights=weights, split=split)

    def _assemble(self, joined: Joined, built: BuiltLayers, shared: Sequence[tuple[str, str]]) -> None:
        """Make this rank's stages and the program; no message to another rank."""
        self._assembly = assemble(
            built.layers,
            self.schedule.placement,
            self._layers_of_stage,
            self.rank,
            device=self.device,
            names=self._layer_names,
            tied=[*self.options.tied, *shared],
            shares_modules=shares_process(self._transport),
        )
        self.stages: list[Stage] = self._assembly.stages
        refuse_wrappers(self.stages, self.schedule, joined.ranks_of_group())
        if self.options.main_gradients:
            require_shapes(self._assembly.named_parameters())
        self.program = self._lowered(self._given)

    def _lowered(self, schedule: Schedule | Program) -> Program:
        has_scaler = grad_scaler_of(self.options.scale_loss) is not None  # its ranks agree where optimizers step
        return prove_and_lower(
            schedule,
            memory_demand(self.options.memory_limit, self.options.costs, schedule, self._layers_of_stage),
            tied_groups=self._assembly.tied_groups,
            optimizer_step=has_scaler or self.options.optimizer_step is not None,
        )

    def _set_up_together(self) -> None:
        agree_on_setup(
            self._transport,
            {
                "the version of Penstock": VERSION,
                "the schedule": f"{self._given!r} #{self._given.digest()[:12]}",
                "the layers": ", ".join(self._layer_names),
                "the split": ", ".join(str(len(layers)) for layers in self._layers_of_stage),
                "the tied parameters": f"stages {self._assembly.tied_groups}",
                "the loss": "none" if self._loss is None else "a function",
                "the loss reduction": self.options.reduction,
                "scale_loss": describe_scale(self.options.scale_loss),
                "slice_dim": str(self.options.slice_dim),
                "the seed": str(self.options.seed),
                "check_batches": str(self.options.check_batches),
                "variable_shapes": str(self.options.variable_shapes),
                "main_gradients": str(self.options.main_gradients),
                "the debug level": self.options.debug,
                "the deadline": f"{self._transport.deadline_s:g} s",
            },
        )
        agree_on_copies(self._transport, self._assembly.tied_copies)
        for copy in self._assembly.tied_copies.values():
            copy.share_values(self._transport)
        self._assembly = with_skips(self._transport, self._assembly, self._layers_of_stage)
        if self.schedule.num_slices > 1:
            refuse_layers_that_look_back(self._transport, self.stages, _LOOKING_BACK)
        problem = unsplittable(self.stages, range(self.schedule.num_stages), "split_backwards=True")
        self._unsplittable = next((str(text) for text in self._transport.all_gather_object(problem) if text), "")
        self._num_parameters = count_parameters(self._transport, self.stages, self._layer_names)

    def _make_runner(self) -> Runner:
        return Runner(
            self._transport,
            self.device,
            self.schedule,
            self._assembly,
            self.options,
            loss=self._loss,
            loss_weights=self._loss_weights,
            program_of=self._program_of,
        )

    def _program_of(self, mode: Mode, num_microbatches: int) -> Program:
        match mode:
            case Mode.TRAIN:
                return self.program
            case Mode.EVALUATE if num_microbatches < self.schedule.num_microbatches:
                return self._lowered(self.schedule.forward_only().first_microbatches(num_microbatches))
            case Mode.EVALUATE:
                return self.program if self.program.is_forward_only else self._lowered(self.schedule.forward_only())
            case Mode.TRAIN_SPLIT:
                return self._lowered(with_split_backwards(self.schedule))

    # ---- one step

    def _train(self, mode: Mode, call: Call, memory: MemoryWatch | None = None) -> StepResult:
        if self._loss is None:
            raise ConfigError("a training step needs a loss; pass loss=... to Pipeline, or call evaluate", key="loss")
        if self.schedule.is_forward_only:
            raise ConfigError(f"{self.schedule.name} has no backwards to train with; call evaluate", key="schedule")
        if mode is Mode.TRAIN_SPLIT and self._unsplittable:
            raise ConfigError(self._unsplittable)
        return self._run(mode, call, memory)

    def _run(self, mode: Mode, call: Call, memory: MemoryWatch | None = None) -> StepResult:
        if self._is_closed:
            raise PipelineError(f"rank {self.rank}: the pipeline is closed; make a new one", rank=self.rank)
        return self._runner.run(mode, call, memory)
