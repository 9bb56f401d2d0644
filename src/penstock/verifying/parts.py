"""The layers as a pipeline at work, on ranks that are threads of this process; each has layers of its own."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, DeadlineExceeded, PeerLost
from penstock.execute.batch.stream import Part
from penstock.execute.stages.layers import Layer
from penstock.execute.stages.names import full_name
from penstock.execute.transport.local import LocalTransport
from penstock.models import cut
from penstock.pipeline import Pipeline
from penstock.planning import ScheduleLike
from penstock.verifying.calls import CallLog
from penstock.verifying.draws import functions_with_same_dropout, set_to_zero
from penstock.verifying.observation import (
    BUFFER,
    EVALUATION,
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    START,
    TRAINING,
    Observation,
    kept,
    named_losses,
    named_outputs,
    shrink,
)
from penstock.verifying.whole_model import Objective

DEADLINE_S = 600.0
"""Seconds that a rank waits for another one; a layer of a large model may take long on a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class RankLayers:
    """The layers that one rank is given, and the unsplit model's names of what they hold."""

    layers: Sequence[Layer]
    model: nn.Module | None = None
    """The model that the layers were cut from, which keeps the ids in use."""
    module_names: Mapping[int, str] = field(default_factory=dict)
    """By id of the module."""
    parameter_names: Mapping[int, str] = field(default_factory=dict)
    """By id of the parameter, the first of its names."""

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[Layer]) -> "RankLayers":
        """Name what layers share with a model."""
        return cls(
            layers,
            model,
            {id(module): name for name, module in model.named_modules()},
            {id(parameter): name for name, parameter in model.named_parameters()},
        )


def layers_of_rank(model: nn.Module, points_or_layers: Sequence[Any]) -> RankLayers:
    """Return the layers of one rank, in memory of its own; `model` stays as it is.

    Raises:
        ConfigError: the points are wrong, or something cannot be copied.
    """
    if is_points(points_or_layers):
        own_model = copied(model)
        return RankLayers.of(own_model, cut(own_model, points_or_layers))
    if not any(isinstance(item, nn.Module) for item in points_or_layers):
        return RankLayers(points_or_layers)  # recipes, of which each rank builds its own
    # Copied together, layers share with the copy of the model what they shared with the model.
    own_model, own_layers = copied((model, points_or_layers))
    return RankLayers.of(own_model, own_layers)


def is_points(points_or_layers: Any) -> bool:
    """Whether these are names at which a model is cut, and no layers."""
    return isinstance(points_or_layers, str) or all(isinstance(item, str) for item in points_or_layers)


def copied(value: Any) -> Any:
    """Return a deep copy. Raises: ConfigError."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise ConfigError(
            f"cannot be copied ({type(error).__name__}: {error}), and the model that is passed stays as it is; let "
            "copy.deepcopy take it, as by keeping results of a forward out of its attributes",
            key="model",
        ) from error


@dataclass(slots=True, eq=False)
class PartsRun:
    """One comparison's pipeline, on some ranks."""

    make_layers: Callable[[], RankLayers]
    schedule: ScheduleLike
    objective: Objective
    device: torch.device
    first_names: Mapping[str, str]
    """The first name of each parameter of the unsplit model, by each of its names."""
    has_same_dropout: bool = False
    """Whether functions drop out by place."""
    is_silent: bool = False
    """Whether layers that a rank builds have their probabilities at 0."""
    sets_training: bool = False
    """Whether all modules are put into training mode."""

    def run(
        self, num_ranks: int, batches: Sequence[Part], modes: Sequence[str], logs: Sequence[CallLog] = ()
    ) -> list[list[Observation]]:
        """Run all batches on all ranks, and return what each rank observed; `logs` note the calls of each.

        Raises:
            Exception: that of the rank to blame.
        """
        transports = LocalTransport.create(num_ranks, DEADLINE_S)
        with ThreadPoolExecutor(num_ranks) as threads:
            futures = [
                threads.submit(self._run_rank, transport, batches, modes, logs[rank] if logs else None)
                for rank, transport in enumerate(transports)
            ]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLost | DeadlineExceeded)):
            raise error
        return [future.result() for future in futures]

    def _run_rank(
        self, transport: LocalTransport, batches: Sequence[Part], modes: Sequence[str], log: CallLog | None
    ) -> list[Observation]:
        try:
            given = self.make_layers()
            objective = self.objective
            pipeline = Pipeline(
                given.layers,
                self.schedule,
                objective.num_microbatches,
                objective.loss,
                count=objective.count,
                transport=transport,
                device=self.device,
                allow_ragged=True,
                deadline_s=DEADLINE_S,
            )
            with closing(pipeline), functions_with_same_dropout(is_on=self.has_same_dropout):
                return self._observe(pipeline, given, batches, modes, log)
        except BaseException:
            transport.abort()  # the other ranks must not wait for this one
            raise

    def _observe(
        self, pipeline: Pipeline, given: RankLayers, batches: Sequence[Part], modes: Sequence[str], log: CallLog | None
    ) -> list[Observation]:
        modules = [module for stage in pipeline.stages for module in stage.modules]
        if self.is_silent:
            set_to_zero(modules)
        if self.sets_training:
            pipeline.train()
        if log is not None:
            log.watch((name, module) for name, module in _named_modules(pipeline, given) if name)
        parameters = {
            given.parameter_names.get(id(parameter), self.first_names.get(name, name)): parameter
            for name, parameter in pipeline.named_parameters()
        }
        observations = [Observation(START, 0, {PARAMETER: kept(parameters), BUFFER: _buffers(pipeline, given)})]
        for number, batch in enumerate(batches):
            for mode in modes:
                call = {EVALUATION: pipeline.evaluate, TRAINING: pipeline.step}[mode]
                for module in modules:
                    module.zero_grad()
                result = call(*batch.args, target=batch.target, return_outputs=True, **batch.kwargs)
                tensors: dict[str, Mapping[str, Tensor | None]] = {LOSS: named_losses(result.loss, result.losses)}
                if result.outputs is not None:
                    tensors[OUTPUT] = named_outputs(result.outputs)
                if mode == TRAINING:
                    tensors[GRADIENT] = kept({name: item.grad for name, item in parameters.items()})
                    tensors[BUFFER] = _buffers(pipeline, given)
                observations.append(Observation(mode, number, tensors))
            shrink(list(parameters.values()))
        return observations


def _named_modules(pipeline: Pipeline, given: RankLayers) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a rank's layers by the unsplit model's names; of layers built here, by those of layers.

    A part of a cut model has no name in the model, but its tensors have; its own name is empty.
    """
    layers = [item for stage in pipeline.stages for item in stage.layers.items()]
    for (layer, holder), (local_name, module) in ((item, each) for item in layers for each in item[1].named_modules()):
        yield given.module_names.get(id(module), full_name(layer, holder, local_name).rstrip(".")), module


def _buffers(pipeline: Pipeline, given: RankLayers) -> dict[str, Tensor | None]:
    return kept(
        {
            f"{owner}.{name}" if owner else name: buffer
            for owner, module in _named_modules(pipeline, given)
            for name, buffer in module.named_buffers(recurse=False)
        }
    )
