"""`Pipeline`: the object that a training loop holds; the same lines on one process and on many.

What runs is planned once: the schedule is built (or read), proved, lowered and proved again before the first step. A
step is then one agreement between the ranks, one run of this rank's instructions, and one exchange of losses.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import ConfigError, PipelineError, StepRefused
from penstock.execute.agreement import Mode, agree_on_setup, digest, known_to_any
from penstock.execute.assemble import Assembly, Layer, assemble, layer_names, spec_attribute
from penstock.execute.failure import FailureDesk
from penstock.execute.gate import Gate
from penstock.execute.interpreter import Hooks, Interpreter
from penstock.execute.loss import Loss, LossWeights
from penstock.execute.messages import Messenger
from penstock.execute.microbatch import merge_outputs
from penstock.execute.options import refuse_unknown, split_options
from penstock.execute.record import Recorder, gather_timeline
from penstock.execute.results import StepResult, share_losses
from penstock.execute.stage import Stage
from penstock.execute.step import Step
from penstock.execute.tied import agree_on_copies
from penstock.execute.transport.protocol import Transport
from penstock.execute.world import default_device, default_transport
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.partition.split import describe_split, split_layers
from penstock.plan import prove_and_lower, resolve_schedule
from penstock.schedules import FAMILIES
from penstock.version import VERSION


class Pipeline:
    """A model split over ranks, run by a schedule.

    `layers`: modules, or callables that build one (`LayerSpec`); those of the own stages are used in place. `schedule`:
    a name, a `Schedule`, or the path of a schedule file. `microbatches`: 8 for a name, else what the schedule is for.
    `split`: layers per stage. `group`: a process group. Further keywords are those of `PipelineOptions`, then options
    of the schedule's family.

    Gradients accumulate in `.grad` until the caller zeroes them.

    Raises:
        ScheduleError, PartitionError, ConfigError: if the schedule, the split or a setting is wrong.
        PipelineError: if the ranks were not set up alike.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        schedule: str | Path | Schedule = "1f1b",
        microbatches: int | None = None,
        loss: Loss | None = None,
        *,
        stages_per_rank: int | None = None,
        split: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.options, family_options = split_options(options)
        self._transport = self.options.transport or default_transport(group, self.options.deadline_s)
        self.rank = self._transport.rank
        self.device = self.options.device or default_device(group)
        self._loss = loss
        self._loss_weights = LossWeights(self.options.reduction, self.options.count)
        if isinstance(schedule, str) and schedule in FAMILIES:
            refuse_unknown(family_options, schedule, FAMILIES[schedule].options)
        self.schedule = resolve_schedule(
            schedule,
            ranks=self._transport.num_ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            options=family_options,
        )
        _require_runnable(self.schedule)
        self._assembly = self._assemble(layers, split)
        self.stages: list[Stage] = self._assembly.stages
        self.program = self._lowered(self.schedule)
        self._desk = FailureDesk(self._transport, self._describe)
        self._messenger = Messenger(
            self._transport,
            self.device,
            has_variable_shapes=self.options.variable_shapes,
        )
        self._is_closed = False
        self._interpreters: dict[Mode, Interpreter] = {}
        self._active: Program = self.program
        self.timeline: Timeline | None = None
        """The measured timeline of the last recorded step, on every rank."""
        self._set_up_together(layers, split)
        own_keywords = frozenset(name for stage in self.stages for name in stage.keyword_names())
        self._gate = Gate(
            self._transport,
            self.device,
            num_microbatches=self.schedule.num_microbatches,
            specs=self.options.specs,
            allow_ragged=self.options.allow_ragged,
            needs_inputs=any(self.schedule.placement.previous_stage[stage.index] < 0 for stage in self.stages),
            own_keywords=own_keywords,
            known_keywords=known_to_any(self._transport, own_keywords),
        )

    # ---- the calls of a training loop

    def step(
        self, *args: Any, target: Any = None, return_outputs: bool = False, record: bool = False, **kwargs: Any
    ) -> StepResult:
        """Run forward and backward of one batch; the same call on every rank.

        Every rank passes the whole batch, or nothing where it needs none: the first stage takes `args`, the last stage
        `target`, and a keyword reaches every layer whose forward names it. `record` measures the step (`timeline`).

        Raises:
            PipelineError: on every rank, if the step fails on any. The next step may be run after it; until then
                gradients hold a part of the failed batch, so zero them.
        """
        if self._loss is None:
            raise ConfigError("a training step needs a loss; pass loss=... to Pipeline, or call evaluate", key="loss")
        if self.schedule.is_forward_only:
            raise ConfigError(f"{self.schedule.name} has no backwards to train with; call evaluate", key="schedule")
        return self._run(Mode.TRAIN, _Call(args, kwargs, target, return_outputs, record))

    def evaluate(
        self, *args: Any, target: Any = None, return_outputs: bool = False, record: bool = False, **kwargs: Any
    ) -> StepResult:
        """Run the forwards of one batch without gradients, layers in evaluation mode; it changes nothing."""
        # Per submodule: a user may keep some of them, such as a frozen BatchNorm, in evaluation mode while training.
        layers = [layer for stage in self.stages for layer in stage.layers.values()]
        modes = [(module, module.training) for layer in layers for module in layer.modules()]
        for stage in self.stages:
            stage.set_training(False)
        try:
            return self._run(Mode.EVALUATE, _Call(args, kwargs, target, return_outputs, record))
        finally:
            for module, mode in modes:
                module.training = mode

    def profile(self, *args: Any, target: Any = None, **kwargs: Any) -> Timeline:
        """Run one training step and return its measured timeline, the same on every rank."""
        self.step(*args, target=target, record=True, **kwargs)
        assert self.timeline is not None
        return self.timeline

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """List this rank's parameters with the unsplit model's names, copies of tied ones included."""
        for stage in self.stages:
            yield from stage.named_parameters()

    @property
    def copied_names(self) -> frozenset[str]:
        """Names of this rank's parameters that are copies of another name's."""
        return self._assembly.copied_names

    @property
    def _holds_last_stage(self) -> bool:
        return any(self.schedule.placement.next_stage[stage.index] < 0 for stage in self.stages)

    @property
    def transport(self) -> Transport:
        """The wires to the other ranks."""
        return self._transport

    def describe_split(self) -> str:
        """Draw which stage has which layers, its share of the weight, and its parameters, copies of tied ones too."""
        return describe_split(self._slices, list(self._num_parameters), self._weights, [*self._num_parameters.values()])

    def close(self) -> None:
        """End the watchdog and release the wires; the modules stay as they are, but no step can be run any more."""
        self._is_closed = True
        self._desk.close()
        self._transport.close()

    # ---- planning

    def _assemble(self, layers: Sequence[Layer], split: Sequence[int] | None) -> Assembly:
        weights = self.options.weights
        if split is not None and weights is not None:
            raise ConfigError("split says already which stage gets how many layers; pass one of the two", key="weights")
        if weights is None:
            weights = [float(spec_attribute(layer, "weight", 1.0)) for layer in layers]
        self._weights = weights
        self._slices = split_layers(len(layers), self.schedule.num_stages, weights=weights, split=split)
        return assemble(
            layers, self.schedule.placement, self._slices, self.rank, device=self.device, tied=self.options.tied
        )

    def _lowered(self, schedule: Schedule) -> Program:
        return prove_and_lower(
            schedule,
            memory_limit=self.options.memory_limit,
            tied_groups=self._assembly.tied_groups,
            optimizer_step=self.options.optimizer_step is not None,
        )

    def _set_up_together(self, layers: Sequence[Layer], split: Sequence[int] | None) -> None:
        agree_on_setup(
            self._transport,
            {
                "the version of Penstock": VERSION,
                "the schedule": f"{self.schedule!r} #{digest(self.schedule.to_csv()):x}",
                "the layers": ", ".join(layer_names(layers)),
                "the split": ", ".join(str(len(part)) for part in self._slices),
                "the tied parameters": f"stages {self._assembly.tied_groups}",
                "the loss": "none" if self._loss is None else "a function",
                "the loss reduction": self.options.reduction,
                "variable_shapes": str(self.options.variable_shapes),
                "the deadline": f"{self._transport.deadline_s:g} s",
            },
        )
        agree_on_copies(self._transport, self._assembly.tied_copies)
        for copy in self._assembly.tied_copies.values():
            copy.share_value(self._transport)
        self._num_parameters = self._count_parameters(layer_names(layers))

    def _count_parameters(self, names: Sequence[str]) -> dict[str, int]:
        """Per layer of the whole model, in order, its number of parameters; a layer is only built on its own rank."""
        own = {name: _num_parameters(layer) for stage in self.stages for name, layer in stage.layers.items()}
        everyone: dict[str, int] = {}
        for theirs in self._transport.all_gather_object(own):
            assert isinstance(theirs, dict)
            everyone |= theirs
        return {name: everyone[name] for name in names}

    def _interpreter(self, mode: Mode) -> Interpreter:
        if mode not in self._interpreters:
            program = self.program if mode is Mode.TRAIN else self._lowered(self.schedule.forward_only())
            hooks = Hooks(
                reduce_stage=self.options.reduce_stage or _do_nothing_with,
                reduce_tied=self._reduce_tied,
                optimizer_step=self.options.optimizer_step or _do_nothing,
            )
            self._interpreters[mode] = Interpreter(program, self.rank, self.stages, self._messenger, hooks)
        return self._interpreters[mode]

    # ---- one step

    def _run(self, mode: Mode, call: "_Call") -> StepResult:
        if self._is_closed:
            raise PipelineError(f"rank {self.rank}: the pipeline is closed; make a new one", rank=self.rank)
        interpreter = self._interpreter(mode)
        self._active = interpreter.program
        with self._failing_together():
            if self._desk.has_failed:
                self._recover()
            self._desk.begin()
            batch = self._gate.admit(mode, call.args, call.kwargs, call.target)
            loss = self._loss if mode is Mode.TRAIN or call.target is not None else None
            # Only the rank of the last stage weighs losses; the others may have no target to count.
            weights = self._loss_weights.of(batch.microbatches) if loss and self._holds_last_stage else []
            step = Step(batch.microbatches, weights, loss, call.return_outputs)
            self._messenger.begin(batch.signature)
            self._begin_tied(mode)
            recorder = self._run_rows(interpreter, step, call.record)
            self._desk.board.note(interpreter.num_rows)
            self._messenger.finish()
            result = share_losses(self._transport, step, len(step.microbatches), self.device)
            if recorder is not None:
                self.timeline = gather_timeline(self._transport, interpreter.program, recorder)
            self._desk.end()
        return _with_outputs(result, step, self.options.merge)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Turn any error into one that every rank raises, and leave nothing of the step behind."""
        try:
            yield
        except StepRefused:
            self._desk.end()
            raise
        except Exception as error:
            report = self._desk.report(error)
            self._messenger.reset()
            for interpreter in self._interpreters.values():
                interpreter.clear()
            for copy in self._assembly.tied_copies.values():
                copy.end_step()
            raise report from error

    def _recover(self) -> None:
        self._desk.recover()
        self._messenger.reset()

    def _begin_tied(self, mode: Mode) -> None:
        if mode is Mode.TRAIN:
            for copy in self._assembly.tied_copies.values():
                copy.begin_step()

    def _reduce_tied(self, group: int) -> None:
        self._assembly.tied_copies[group].reduce(self._transport)

    def _run_rows(self, interpreter: Interpreter, step: Step, record: bool) -> Recorder | None:
        if record:
            return interpreter.run_recorded(step, self._desk.board.note)
        interpreter.run(step, self._desk.board.note)
        return None

    def _describe(self, rank: int, row: int) -> str:
        first, end = self._active.offsets[rank : rank + 2]
        return str(self._active.instruction(int(first) + row)) if row < end - first else ""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments of one `step` or `evaluate`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    return_outputs: bool
    record: bool


def _num_parameters(layer: nn.Module) -> int:
    """Count the parameters of a layer; those that wait for a first input to have a shape count nothing."""
    return sum(parameter.numel() for parameter in layer.parameters() if not is_lazy(parameter))


def _require_runnable(schedule: Schedule) -> None:
    """Refuse what can be planned, but not run: it would give wrong gradients silently."""
    if schedule.num_slices > 1:
        raise ConfigError(
            f"{schedule.name} cuts microbatches into {schedule.num_slices} slices, which a pipeline does not run yet; "
            "use a schedule with 1 slice",
            key="schedule",
        )
    if len(schedule.placement.routes) > 1:
        raise ConfigError(
            f"{schedule.name} has {len(schedule.placement.routes)} routes, which a pipeline does not run yet; "
            "use a schedule with one route of stages",
            key="schedule",
        )


def _with_outputs(result: StepResult, step: Step, merge: Any) -> StepResult:
    if not step.outputs:
        return result
    return replace(result, outputs=merge_outputs([step.outputs[index] for index in sorted(step.outputs)], merge))


def _do_nothing() -> None:
    """No optimizer step was asked for."""


def _do_nothing_with(stage: int) -> None:
    """No reduction was asked for."""
