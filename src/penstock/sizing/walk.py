"""`Walk`: one microbatch on its way through all layers, stage by stage.

Every layer runs its forward, so that what it keeps is counted where it stands: tables that the layers of a stage share,
as those of rotary positions, count in the first of them. The operations of the forward, with their shapes, are the kind
of a layer. Of each kind one layer runs its backwards, for all of them.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.output import read_loss, takes_weight
from penstock.execute.observing.layer_sizes import (
    ACTIVATION,
    CHECKPOINT,
    GRADIENT,
    MESSAGE,
    PARAMETER,
)
from penstock.execute.stages.layers import own_ties
from penstock.execute.stages.stage import Stage
from penstock.garbage import garbage_left
from penstock.simulation.costs.layer_work import LayerWork
from penstock.sizing.batch import TokenBatch, require_tokens
from penstock.sizing.fake_layers import FakeLayers
from penstock.sizing.layer_run import CountedStage, KindWork, LayerCall, work_of
from penstock.sizing.trace import Trace
from penstock.sizing.undocumented import depends_on_values
from penstock.train.activation_checkpoints import checkpoint_layer
from penstock.train.measuring.measure import LayerPasses
from penstock.train.settings.section import Kept


@dataclass(frozen=True, slots=True, eq=False)
class SizedLayer:
    """A layer of the model, by name, and which activation checkpointing it has."""

    name: str
    layer: Any
    kept: Kept = "none"


@dataclass(slots=True, eq=False)
class _Forward:
    """A forward of one layer that has run, and whose graph is held."""

    call: LayerCall
    passes: LayerPasses
    roots: Sequence[torch.Tensor]
    kind: Hashable


class Walk:
    """A microbatch on its way through the layers of a model."""

    def __init__(
        self, layers: Sequence[SizedLayer], batch: TokenBatch, loss: Loss | None, dtype: torch.dtype | None
    ) -> None:
        self._layers, self._batch, self._loss = layers, batch, loss
        self._fake_layers = FakeLayers(dtype)
        self._args = batch.args
        self._skips: dict[str, Any] = {}
        self._work_by_kind: dict[Hashable, KindWork] = {}
        self._trained_ids: set[int] = set()
        """Ids of the parameters to which any layer brings a gradient; the fakes of all layers are held."""

    def works(self, layers_of_stage: Sequence[range]) -> list[LayerWork]:
        """Return the work of all layers, which these stages hold."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), garbage_left():
            return [work for stage, layers in enumerate(layers_of_stage) for work in self._stage_works(stage, layers)]

    def _stage_works(self, number: int, layers: range) -> list[LayerWork]:
        sized_layers = [self._layers[layer] for layer in layers]
        modules = {item.name: self._built(item) for item in sized_layers}
        _tie(sized_layers, modules)
        counted = CountedStage(Stage(number, modules, first_layer=layers.start))
        with counted.forward():
            forwards = [
                self._forward(counted, layer, module) for layer, module in zip(layers, modules.values(), strict=True)
            ]
        kinds = [self._kind_work(forward) for forward in forwards]
        sizes_by_layer = counted.sizes.local_sizes(None)
        return [
            _layer_work(forward.call, kind, sizes_by_layer[str(forward.call.index)])
            for forward, kind in zip(forwards, kinds, strict=True)
        ]

    def _built(self, item: SizedLayer) -> nn.Module:
        module = self._fake_layers.build(item.layer, item.name)
        if item is self._layers[0]:
            require_tokens(module, item.name)
        return checkpoint_layer(module, item.kept)

    def _forward(self, counted: CountedStage, index: int, module: nn.Module) -> _Forward:
        item, is_last = self._layers[index], index == len(self._layers) - 1
        keywords = self._batch.keywords_for(module)
        finish = self._finish if is_last and self._loss is not None else _as_it_is
        call = LayerCall(
            item.name, index, module, self._args, keywords, self._skips, finish, is_last=finish is not _as_it_is
        )
        trace, passes = Trace(), call.passes()
        with _naming(item.name), trace:
            roots = passes.forward()
        self._args, self._skips = (passes.output,), self._skips | passes.held_skips
        kind = (tuple(trace.kind), tuple(map(_shown, module.parameters())), item.kept, call.is_last)
        return _Forward(call, passes, roots, kind)

    def _finish(self, output: Any) -> Any:
        assert self._loss is not None, "only layers in front of a loss are finished by it"
        options = {"weight": 1.0} if takes_weight(self._loss) else {}
        return read_loss(self._loss(output, self._batch.target_of(output), **options), microbatch=0).loss

    def _kind_work(self, forward: _Forward) -> KindWork:
        if forward.kind not in self._work_by_kind:
            with _naming(forward.call.name):
                self._give_gradients(forward.call.module.parameters())
                self._work_by_kind[forward.kind] = work_of(forward.call)
        kind = self._work_by_kind[forward.kind]
        parameters = list(forward.call.module.parameters())
        self._trained_ids |= {
            id(parameter)
            for parameter, gets_gradient in zip(parameters, kind.gets_gradient, strict=True)
            if gets_gradient
        }
        self._give_gradients([parameter for parameter in parameters if id(parameter) in self._trained_ids])
        for parameter in parameters:
            if id(parameter) not in self._trained_ids:
                parameter.grad = None
        return kind

    def _give_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let parameters have gradients, as after an earlier microbatch."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = self._fake_layers.like(parameter)


def _layer_work(call: LayerCall, kind: KindWork, sizes: dict[str, int]) -> LayerWork:
    parameters = list(call.module.parameters())
    return LayerWork(
        name=call.name,
        forward=kind.forward,
        backward_input=kind.backward_input,
        backward_weight=kind.backward_weight,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sizes[PARAMETER],
        gradient_bytes=sizes[GRADIENT],
        activation_bytes=sizes[ACTIVATION],
        weight_context_bytes=kind.weight_context_bytes,
        message_bytes=sizes[MESSAGE],
        checkpoint_bytes=sizes[CHECKPOINT],
        forward_workspace_bytes=kind.forward_workspace_bytes,
        backward_workspace_bytes=kind.backward_workspace_bytes,
    )


def _tie(layers: Sequence[SizedLayer], modules: dict[str, nn.Module]) -> None:
    """Have layers of one stage share the parameters that their specs tie."""
    owners = {
        getattr(item.layer, "full_name", lambda name: name)(name): parameter
        for item in layers
        for name, parameter in modules[item.name].named_parameters()
    }
    for item in layers:
        for local_name, owner_name in own_ties(item.layer):
            if owner_name in owners:
                *path, attribute = local_name.split(".")
                owner = modules[item.name].get_submodule(".".join(path))
                owner.register_parameter(attribute, owners[owner_name])


def _shown(parameter: nn.Parameter) -> Hashable:
    return tuple(parameter.shape), parameter.dtype, parameter.requires_grad


def _as_it_is(output: Any) -> Any:
    return output


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the layer that cannot run without values. Raises: ConfigError, in the place of other errors."""
    try:
        yield
    except Exception as error:
        if depends_on_values(error):
            raise ConfigError(
                f"layer {name!r} decides by values, which are not there: {error}. Expected a layer that does the same "
                "for all tokens; of experts, give those that compute all of them in one grouped product, as "
                "experts_implementation='grouped_mm' of transformers",
                key="layers",
            ) from error
        if isinstance(error, PenstockError):
            raise
        raise ConfigError(
            f"layer {name!r} cannot be counted without values: {type(error).__name__}: {error}", key="layers"
        ) from error
