"""For users of DeepSpeed's pipelines: `PipelineModule`, and an engine with `train_batch` and `eval_batch`.

docs/moving/deepspeed.md describes what differs, and what can be deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import ConfigError, PipelineError
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.batch.stream import Part, Stream
from penstock.execute.control.agreement import Mode
from penstock.execute.control.collectives import Control
from penstock.execute.losses.ignored import counted_targets
from penstock.execute.losses.results import StepResult
from penstock.execute.stages.layers import Layer
from penstock.execute.transport.calls import collective
from penstock.ir.schedule import Schedule
from penstock.models.layer import LayerSpec as Spec
from penstock.moving.deepspeed_data import BatchItems
from penstock.moving.deepspeed_module import PAGE, LayerSpec, PipelineModule, TiedLayerSpec
from penstock.moving.own_stages import AnySchedule, LocalStage, PipelineMaker, require_parts
from penstock.pipeline import Pipeline

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


_KEYWORDS = "give gradient_accumulation_steps, gradient_clipping, optimizer, lr_scheduler by keyword"
_UNUSED_ARGUMENTS = {
    "args": f"is not read; {_KEYWORDS}",
    "config": f"is not read; {_KEYWORDS}",
    "model_parameters": "is not needed: optimizer(parameters) is called with those of this rank",
    "training_data": "is not taken: give every call of train_batch an iterator",
}
"""Arguments of DeepSpeed's function of this name, and what to do instead."""
_TRAINS = "train_batch runs forward, backward and the optimizer of a whole batch"
_REPLACEMENTS = {
    "save_checkpoint": "ps.save_checkpoint(folder, engine.pipeline, engine.optimizer, step=engine.global_steps)",
    "load_checkpoint": "ps.load_checkpoint(folder, engine.pipeline, engine.optimizer), which returns the step",
    "forward": _TRAINS,
    "backward": _TRAINS,
    "step": _TRAINS,
    "module": "engine.pipeline has the parameters and the state of this rank's layers",
}
"""Attributes of DeepSpeed's engine, and what to use instead."""


def initialize(
    model: PipelineModule,
    *,
    optimizer: MakeOptimizer | None = None,
    lr_scheduler: MakeScheduler | None = None,
    gradient_accumulation_steps: int = 1,
    gradient_clipping: float = 0.0,
    schedule: AnySchedule = "1f1b",
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> "Engine":
    """Build this rank's layers and return the engine that trains them; every rank calls it.

    It takes the place of `deepspeed.initialize`. `optimizer(parameters)` makes the optimizer of this rank's parameters,
    and `lr_scheduler(optimizer)` its scheduler; an engine without an optimizer computes gradients only.
    `gradient_accumulation_steps` is the number of microbatches of a batch. `gradient_clipping` is the largest norm over
    all ranks; 0 does not clip. `schedule` is a name, a file, a `penstock.Schedule`, or a subclass of `PipeSchedule`.
    Further keywords are `split` (layers per stage, in place of `partition_method`) and those of `Pipeline`. With `mesh`
    there are replicas, each with data of its own.

    Raises:
        ConfigError, PartitionError: if the model cannot be divided as asked.
    """
    for name in _UNUSED_ARGUMENTS:
        if name in options:
            raise ConfigError(_UNUSED_ARGUMENTS[name], key=name)
    for name, factory in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if factory is not None and not callable(factory):
            raise ConfigError(
                f"a {type(factory).__name__}; give a function that makes it, since only now the rank's "
                "parameters exist",
                key=name,
            )
    engine = Engine(
        model, gradient_accumulation_steps, schedule, group=group, gradient_clipping=gradient_clipping, **options
    )
    if optimizer is not None:
        engine.train_with(optimizer, lr_scheduler)
    return engine


class Engine:
    """A divided model with its optimizer."""

    def __init__(
        self,
        model: PipelineModule,
        num_microbatches: int,
        schedule: AnySchedule = "1f1b",
        *,
        group: dist.ProcessGroup | None = None,
        gradient_clipping: float = 0.0,
        **options: Any,
    ) -> None:
        """Keep the arguments, and make the pipeline for training; every rank calls it.

        `num_microbatches` is the number of microbatches of a batch. Evaluation with another number makes a second
        pipeline of the same modules. `options` are those of `Pipeline`.
        """
        # What users read of an engine, under DeepSpeed's names.
        self.model = model
        self.num_microbatches = num_microbatches
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.global_steps = 0
        self.grad_norm: float | None = None
        """The norm of the last batch's gradients, over all ranks and before clipping; None without clipping."""
        # What further pipelines are made of, one for each number of microbatches; and the norm that gradients may have.
        self._schedule = schedule
        self._group = group
        self._clip_norm = gradient_clipping
        self._options = options
        self._layers = model.specs()
        self._pipelines: dict[int, Pipeline] = {}
        """The pipelines made so far, by number of microbatches."""
        self.pipeline = self._pipeline(num_microbatches)
        self.result: StepResult | None = None
        """The result of the last batch's step."""
        self._items: BatchItems | None = None
        """The items of the batch that runs, or of the last one that needed any."""

    def __getattr__(self, name: str) -> Any:
        instead = _REPLACEMENTS.get(name, "see the table of the page")
        raise AttributeError(f"Engine has no {name!r}: {instead} ({PAGE})", name=name, obj=self)

    def train_with(self, optimizer: MakeOptimizer, lr_scheduler: MakeScheduler | None = None) -> None:
        """Make the optimizer of this rank's parameters."""
        parameters = self.parameters()
        # A rank of functions alone has nothing to train, and an optimizer of nothing is an error in torch.
        self.optimizer = optimizer(parameters or [nn.Parameter(torch.zeros(0))])
        self.lr_scheduler = None if lr_scheduler is None else lr_scheduler(self.optimizer)

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, one that several layers share once."""
        return list(self.pipeline.parameters())

    @property
    def control(self) -> Control:
        """The collectives of the pipeline that is trained."""
        return self.pipeline.control

    @collective
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the next `gradient_accumulation_steps` items `(inputs, labels)`; every rank gets the mean loss.

        The rank of the first layer takes the inputs and that of the last one the labels, each off an iterator of its
        own over the same data; other ranks need none. An item is pulled when its first forward or loss needs it, or
        while the rank would wait. Where losses are weighed by their labels, all are pulled before the first backward.
        Then the optimizer and its scheduler take a step.

        Raises:
            EndOfData: on every rank, if a rank's data are at an end.
            StepRefused: on every rank, if a rank that needs data has none, or other ones.
            PipelineError: on every rank, if the step fails on any, or data end within it.
        """
        self._require_loss()
        with _passing_over_failed(self):
            inputs, labels = self._take_batch(self.pipeline, data_iter, Mode.TRAIN)
            try:
                self.result = self.pipeline.step(*inputs, target=labels)
            except PipelineError:
                if self.optimizer is not None:
                    self.optimizer.zero_grad()  # they hold a part of the batch, and the next batch would add to them
                raise
        if self._clip_norm:
            self.grad_norm = self.pipeline.clip_grad_norm_(self._clip_norm).item()
        self.global_steps += 1
        if self.optimizer is not None:
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.optimizer.zero_grad()
        assert self.result.loss is not None
        return self.result.loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: Literal["avg"] | None = "avg",
        *,
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate the next items; return the mean loss, on every rank whatever `bcast_loss` says.

        The arguments are DeepSpeed's. With `return_logits`, return a pair of the loss and the outputs, which the rank
        of the last layer has and all other ranks get as None. Without `compute_loss`, return the outputs alone. Without
        `reduce_output`, the loss is the list of the losses of the microbatches. `num_micro_batches` is by default that
        of training.
        """
        if compute_loss:
            self._require_loss()
        pipeline = self._pipeline(num_micro_batches or self.num_microbatches)
        wants_outputs = self.is_last_stage() and (return_logits or not compute_loss)
        with _passing_over_failed(self):
            inputs, labels = self._take_batch(pipeline, data_iter, Mode.EVALUATE, needs_labels=compute_loss)
            self.result = pipeline.evaluate(*inputs, target=labels, return_outputs=wants_outputs)
        if not compute_loss:
            return self.result.outputs
        loss = self.result.losses if reduce_output is None else self.result.loss
        return (loss, self.result.outputs) if return_logits else loss

    def is_first_stage(self) -> bool:
        """Whether this rank takes inputs."""
        previous = self.pipeline.schedule.placement.previous_stage
        return any(previous[stage.index] < 0 for stage in self.pipeline.stages)

    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        following = self.pipeline.schedule.placement.next_stage
        return any(following[stage.index] < 0 for stage in self.pipeline.stages)

    def close(self) -> None:
        """Release the transport."""
        for pipeline in self._pipelines.values():
            pipeline.close()

    def _pipeline(self, num_microbatches: int) -> Pipeline:
        """Return the pipeline for so many microbatches; the pipelines of all numbers run the same modules."""
        if num_microbatches not in self._pipelines:
            if self._pipelines and self.pipeline.options.is_sharded:
                raise ConfigError(
                    f"{num_microbatches}, but the shards of the weights belong to the pipeline of batches of "
                    f"{self.num_microbatches}; evaluate as many, or leave out shard",
                    key="num_micro_batches",
                )
            self._pipelines[num_microbatches] = self._make_pipeline(num_microbatches)
        return self._pipelines[num_microbatches]

    def _make_pipeline(self, num_microbatches: int) -> Pipeline:
        """Return a pipeline of the model for this number of microbatches; every rank calls it.

        The first pipeline builds the layers of this rank, and later ones share its modules.

        Raises:
            ConfigError, PartitionError: on every rank, if the model cannot be divided over the ranks as asked.
        """
        options = dict(self._options)
        split = options.pop("split", None)
        maker = PipelineMaker.of(
            self._group, options if split is not None else {"weights": self.model.weights, **options}
        )
        schedule = maker.joined.together(
            lambda: _schedule_of(maker, self._schedule, self.model.num_stages, num_microbatches)
        )
        layers: list[Layer] = list(self._layers)
        pipeline_options = dict(maker.options)
        if self._pipelines:
            layers = _with_modules(self._layers, self.pipeline, has_copies=len(schedule.placement.routes) > 1)
            # A module that is there has no spec, which said to what its parameters are tied.
            pipeline_options["tied"] = [*pipeline_options.get("tied", ()), *_ties(self._layers)]
        return Pipeline(
            layers,
            schedule,
            loss=self.model.loss_fn,
            split=split,
            process_group=self._group,
            ranks=maker.transport.num_ranks,
            **maker.connection,
            **pipeline_options,
        )

    def _require_loss(self) -> None:
        if self.model.loss_fn is None:
            raise ConfigError("is missing, so there is no loss to compute; give it to PipelineModule", key="loss_fn")

    def _take_batch(
        self, pipeline: Pipeline, data_iter: Iterator[Any] | None, mode: Mode, *, needs_labels: bool = True
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the inputs and labels of a batch, as far as this rank needs them, or a stream of both.

        Where the data are wrong, the step is refused on all ranks.
        """
        is_first, is_last = self.is_first_stage(), self.is_last_stage()
        self._items = None
        if not (is_first or is_last) or (data_iter is None and not is_first and not needs_labels):
            return (), None

        def part(item: Any) -> Part:
            return Part(*item[:1] * is_first, target=item[1] if is_last else None)

        try:
            self._items = items = BatchItems(data_iter, pipeline.rank, pipeline.schedule.num_microbatches)
            if mode is Mode.TRAIN and not _weighs_by_labels(pipeline, self.model.loss_fn):
                return (Stream(items, preprocess=part),), None
            inputs, labels = zip(*items, strict=True)
        except PipelineError as error:
            pipeline.refuse(error, mode)
        inputs_for_step = (PreSplit(inputs),) if is_first else ()
        return inputs_for_step, PreSplit(labels) if is_last and needs_labels else None


@contextmanager
def _passing_over_failed(engine: Engine) -> Iterator[None]:
    """Pull what a batch that fails leaves: ranks have pulled different numbers, and go on with the same items."""
    try:
        yield
    except PipelineError:
        if engine._items is not None:
            engine._items.pass_over()
        raise


def _weighs_by_labels(pipeline: Pipeline, loss: Any) -> bool:
    """Whether all labels of a batch must be known before its first backward, such as to count their tokens."""
    options = pipeline.options
    return options.count is not None or (options.reduction == "mean" and counted_targets(loss) is not None)


def _schedule_of(
    maker: PipelineMaker, schedule: AnySchedule, num_stages: int | None, num_microbatches: int
) -> Schedule:
    """Return the schedule for a model of so many stages. Raises: ConfigError, where it does not fit them."""
    num_ranks = maker.transport.num_ranks
    if num_stages is not None and num_stages % num_ranks:
        raise ConfigError(f"{num_stages} on {num_ranks} ranks; give a multiple", key="num_stages")
    stages_per_rank = maker.stages_per_rank(schedule, num_stages or num_ranks)
    table = maker.schedule(schedule, num_microbatches, stages_per_rank)
    if num_stages is not None:
        require_parts(table, num_stages, "num_stages")
    return table


def _with_modules(layers: Sequence[nn.Module | Spec], pipeline: Pipeline, *, has_copies: bool) -> list[Layer]:
    """Return the layers with the modules of this rank's pipeline, which has built them, in place of their specs."""
    modules = dict(pair for stage in pipeline.stages for pair in stage.layers.items())
    layers_or_modules: list[Layer] = []
    for index, layer in enumerate(layers):
        module = modules.get(str(index))
        # Where ranks are threads, a second route would run a deep copy of a bare module.
        layers_or_modules.append(layer if module is None else LocalStage(module) if has_copies else module)
    return layers_or_modules


def _ties(layers: Sequence[nn.Module | Spec]) -> list[tuple[str, str]]:
    """Return pairs of parameter names that the specs among the layers tie to each other."""
    specs = [(index, layer) for index, layer in enumerate(layers) if isinstance(layer, Spec)]
    return [(f"{index}.{name}", owner_name) for index, spec in specs for name, owner_name in spec.tied]


__all__ = ["Engine", "LayerSpec", "PipelineModule", "TiedLayerSpec", "initialize"]
