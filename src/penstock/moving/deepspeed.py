"""For users of DeepSpeed's pipelines: `PipelineModule`, and an engine with `train_batch` and `eval_batch`.

What differs, and what can be deleted, is told in docs/moving/deepspeed.md.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import ConfigError
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.losses.results import StepResult
from penstock.execute.tree import map_leaves
from penstock.ir.schedule import Schedule
from penstock.moving.deepspeed_module import LayerSpec, PipelineModule, TiedLayerSpec
from penstock.moving.own_stages import Site
from penstock.pipeline import Pipeline
from penstock.train.optim import clip_gradients

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def initialize(
    model: PipelineModule,
    *,
    optimizer: MakeOptimizer | None = None,
    lr_scheduler: MakeScheduler | None = None,
    gradient_accumulation_steps: int = 1,
    gradient_clipping: float = 0.0,
    schedule: str | Path | Schedule = "1f1b",
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> "Engine":
    """Build this rank's layers and return the engine that trains them; every rank calls it.

    `optimizer(parameters)` makes the optimizer of this rank's parameters, `lr_scheduler(optimizer)` its scheduler; an
    engine without an optimizer computes gradients only. `gradient_accumulation_steps` is the number of microbatches of
    a batch. Gradients are clipped by their norm over all ranks; 0 leaves them. Further keywords are `split` (layers per
    stage, in place of `partition_method`) and those of `Pipeline`.

    Raises:
        ConfigError, PartitionError: if the model cannot be divided as asked.
    """
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
        schedule: str | Path | Schedule = "1f1b",
        *,
        group: dist.ProcessGroup | None = None,
        gradient_clipping: float = 0.0,
        **options: Any,
    ) -> None:
        self.model = model
        self.num_microbatches = num_microbatches
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.global_steps = 0
        self.grad_norm: float | None = None
        """Of the last batch, over all ranks and before clipping; None without clipping."""
        self._schedule = schedule
        self._group = group
        self._clip_norm = gradient_clipping
        self._options = options
        self._layers = model.specs()
        self._pipelines: dict[int, Pipeline] = {}
        self.pipeline = self._pipeline(num_microbatches)
        self.result: StepResult | None = None
        """What the last batch's step gave back."""

    def train_with(self, optimizer: MakeOptimizer, lr_scheduler: MakeScheduler | None = None) -> None:
        """Make the optimizer of this rank's parameters."""
        parameters = self.parameters()
        # A rank of functions alone has nothing to train, and an optimizer of nothing is an error in torch.
        self.optimizer = optimizer(parameters or [nn.Parameter(torch.zeros(0))])
        self.lr_scheduler = None if lr_scheduler is None else lr_scheduler(self.optimizer)

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, one that several layers share once."""
        return list({id(parameter): parameter for _, parameter in self.pipeline.named_parameters()}.values())

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the next `gradient_accumulation_steps` items `(inputs, labels)`; every rank gets the mean loss.

        The rank of the first layer takes the inputs and that of the last one the labels, each off an iterator of its
        own over the same data; other ranks need none. Then the optimizer and its scheduler take a step.

        Raises:
            StepRefused: on every rank, if a rank's data end too early.
            PipelineError: on every rank, if the step fails on any.
        """
        inputs, labels = self._pull(self.pipeline, data_iter)
        self.result = self.pipeline.step(*inputs, target=labels)
        if self._clip_norm:
            named = [(name, parameter.grad) for name, parameter in self.pipeline.named_parameters()]
            gather = self.pipeline.transport.all_gather_object
            self.grad_norm = clip_gradients(named, gather, self._clip_norm, skip=self.pipeline.copied_names)
        self._update()
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

        With `return_logits`, a pair of it and the outputs, which the rank of the last layer has; without
        `compute_loss`, the outputs alone; without `reduce_output`, the losses of the microbatches.
        """
        pipeline = self._pipeline(num_micro_batches or self.num_microbatches)
        inputs, labels = self._pull(pipeline, data_iter)
        wants_outputs = self.is_last_stage() and (return_logits or not compute_loss)
        self.result = pipeline.evaluate(*inputs, target=labels if compute_loss else None, return_outputs=wants_outputs)
        if not compute_loss:
            return self.result.outputs
        loss = self.result.losses if reduce_output is None else self.result.loss
        return (loss, self.result.outputs) if return_logits else loss

    def is_first_stage(self) -> bool:
        """Whether this rank takes inputs."""
        return any(stage.index == 0 for stage in self.pipeline.stages)

    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        return any(stage.index == self.pipeline.schedule.num_stages - 1 for stage in self.pipeline.stages)

    def close(self) -> None:
        """Release the wires."""
        for pipeline in self._pipelines.values():
            pipeline.close()

    def _pipeline(self, num_microbatches: int) -> Pipeline:
        """The pipeline for so many microbatches; all of them run the same modules."""
        if num_microbatches not in self._pipelines:
            self._pipelines[num_microbatches] = self._make(num_microbatches)
        return self._pipelines[num_microbatches]

    def _make(self, num_microbatches: int) -> Pipeline:
        given = dict(self._options)
        split = given.pop("split", None)
        site = Site.of(self._group, given if split is not None else {"weights": self.model.weights, **given})
        num_ranks = site.transport.num_ranks
        num_stages = self.model.num_stages or num_ranks
        if num_stages % num_ranks:
            raise ConfigError(f"{num_stages} on {num_ranks} ranks; give a multiple", key="num_stages")
        schedule = site.schedule(self._schedule, num_microbatches, num_stages // num_ranks)
        layers = list(self._layers)
        options = dict(site.options)
        if self._pipelines:
            built = {name: module for stage in self.pipeline.stages for name, module in stage.layers.items()}
            layers = [built.get(str(index), layer) for index, layer in enumerate(layers)]
            options["tied"] = [*options.get("tied", ()), *self._ties()]
        return Pipeline(
            layers,
            schedule,
            loss=self.model.loss_fn,
            split=split,
            group=self._group,
            transport=site.transport,
            **options,
        )

    def _ties(self) -> list[tuple[str, str]]:
        """What the specs tie, for layers that are modules by now."""
        specs = [(index, layer) for index, layer in enumerate(self._layers) if not isinstance(layer, nn.Module)]
        return [(f"{index}.{own}", other) for index, spec in specs for own, other in spec.tied]

    def _pull(self, pipeline: Pipeline, data_iter: Iterator[Any] | None) -> tuple[tuple[Any, ...], Any]:
        """Take a batch's items; where there are too few, the step is refused on all ranks by their number."""
        if data_iter is None or not (self.is_first_stage() or self.is_last_stage()):
            return (), None
        items = list(islice(data_iter, pipeline.schedule.num_microbatches))
        inputs, labels = zip(*items, strict=True) if items else ((), ())
        first = (PreSplit(_on(self.pipeline.device, inputs)),) if self.is_first_stage() else ()
        return first, PreSplit(_on(self.pipeline.device, labels)) if self.is_last_stage() else None

    def _update(self) -> None:
        self.global_steps += 1
        if self.optimizer is None:
            return
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()


def _on(device: torch.device, items: tuple[Any, ...]) -> list[Any]:
    return [map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, item) for item in items]


__all__ = ["Engine", "LayerSpec", "PipelineModule", "TiedLayerSpec", "initialize"]
