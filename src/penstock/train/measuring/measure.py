"""The seconds of each layer of a model, measured on a microbatch, so that the split into stages can use them.

Layers run one after another on one device, each by itself: one that is built lazily is there only while it is measured,
and of the others' activations nothing is kept but what the next layer gets. So a model that no device can hold as a
whole can be measured, as long as each of its layers fits.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import ConfigError, PartitionError, PipelineError
from penstock.execute.accelerator import is_queued, synchronize
from penstock.execute.batch.needs import batch_binding
from penstock.execute.control.collectives import Control, Failure
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.output import takes_weight
from penstock.execute.parameters.gradient_store import without_gradients
from penstock.execute.stages.auxiliary import Auxiliary, take_all
from penstock.execute.stages.feature import modules_with
from penstock.execute.stages.layers import Layer, layer_names
from penstock.execute.stages.signatures import taken_keywords
from penstock.execute.stages.skips import StageSkipBuffer, StageSkips, skip_names
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.world import default_device, default_transport
from penstock.execute.values.tree import as_graph_leaves, flatten, map_leaves
from penstock.microbatch_place import MICROBATCH_PLACE, MicrobatchPlace

NUM_WARM_UP_ROUNDS = 1
MAX_WAIT_S = 3600.0
"""Seconds that the other ranks wait for the one that measures."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Median seconds of a forward and of a whole backward, one entry per layer; the loss is part of the last one."""

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """Seconds of forward and backward together, by which a split keeps all ranks equally busy."""
        return tuple(map(sum, zip(self.forward_s, self.backward_s, strict=True)))


def measure_layers(
    layers: Sequence[Layer],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    *,
    loss: Loss | None = None,
    num_rounds: int = 7,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LayerTimes:
    """Measure every layer on a microbatch; the `weights` of the result are for those of `Pipeline`.

        times = measure_layers(layers, (tokens[:2],), target=labels[:2], loss=loss_fn)
        pipeline = Pipeline(layers, "zbv", loss=loss_fn, weights=times.weights)

    `args` and `kwargs` are what `Pipeline.step` takes, of one microbatch. Layers may be modules or callables that build
    one, as there; parameters, gradients, buffers and random numbers are afterwards as they were before. Where
    torch.distributed is initialised, or a `transport` is passed, every rank of the group calls it: the first one
    measures, and all get its times, since a split is the same on all ranks.

    Raises:
        PartitionError: no layers, or one that is neither a module nor builds one.
        ConfigError: no rounds.
        PipelineError: on the other ranks, if the first one could not measure.
    """
    if not layers:
        raise PartitionError("there are no layers to measure; pass those that Pipeline is to get")
    if num_rounds < 1:
        raise ConfigError(f"{num_rounds} is out of range; expected a whole number, 1 or larger", key="num_rounds")
    measuring_device = device or default_device(group)

    def measure() -> dict[str, Any]:
        binding = batch_binding(layers)
        batch = (tuple(args), dict(kwargs or {})) if binding is None else binding.bind(args, kwargs or {})
        moved_args, moved_kwargs = map_leaves(partial(_to, measuring_device), batch)
        walk = _Walk(moved_args, moved_kwargs, measuring_device, num_rounds, clock)
        return asdict(walk.times(layers, _last_call(loss, target, measuring_device)))

    rank_transport = transport or default_transport(group, MAX_WAIT_S, device=device)

    def error_of(failure: Failure) -> Exception:
        return failure.local_error or PipelineError(
            f"rank {rank_transport.rank}: rank 0 could not measure the layers, which all ranks are split by: "
            f"{failure.kind}: {failure.text}. See its output; or give weights or a split without measuring",
            rank=0,
        )

    try:
        # If rank 0 fails, the other ranks, which wait for its times, must hear of it.
        received = Control(rank_transport).on_rank_0(measure, error_of)
    finally:
        if transport is None:
            rank_transport.close()
    return LayerTimes(**{name: tuple(values) for name, values in received.items()})


def _last_call(loss: Loss | None, target: Any, device: torch.device) -> Callable[[Any], Any]:
    """Return the function of the last layer's output that is measured with the layer: the loss, if there is one."""
    if loss is None:
        return _as_it_is
    own_target = map_leaves(partial(_to, device), target)
    loss_options = {"weight": 1.0} if takes_weight(loss) else {}
    return lambda output: loss(output, own_target, **loss_options)


def _as_it_is(output: Any) -> Any:
    return output


@dataclass(slots=True, eq=False)
class _Walk:
    """A microbatch on its way through the layers, each of which it meets several times."""

    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]
    _device: torch.device
    _num_rounds: int
    _clock: Callable[[], float]
    _skips: dict[str, Any] = field(default_factory=dict)

    def times(self, layers: Sequence[Layer], last_call: Callable[[Any], Any]) -> LayerTimes:
        """Measure all layers, in order."""
        names = layer_names(layers)
        finishes = [_as_it_is] * (len(layers) - 1) + [last_call]
        devices = [self._device] if is_queued(self._device) else []
        with torch.random.fork_rng(devices, device_type=self._device.type), torch.enable_grad():
            seconds = list(map(self._usual_s, layers, names, finishes))
        forward_s, backward_s = zip(*seconds, strict=True)
        return LayerTimes(tuple(names), forward_s, backward_s)

    def _usual_s(self, layer: Layer, name: str, finish: Callable[[Any], Any]) -> tuple[float, float]:
        """Return the median seconds of the layer's forward and backward; a layer that was built here is gone then."""
        with _borrowed(layer, name, self._device) as module:
            keywords = taken_keywords(module).select(
                {**self._kwargs, MICROBATCH_PLACE: MicrobatchPlace(0, 1, 0, 1.0)}, len(self._args)
            )
            work = LayerPasses(module, self._args, keywords, self._skips, finish=finish)
            rounds = [self._round_s(work) for _ in range(NUM_WARM_UP_ROUNDS + self._num_rounds)]
        self._args, self._skips = (work.output,), self._skips | work.held_skips
        forwards, backwards = zip(*rounds[NUM_WARM_UP_ROUNDS:], strict=True)
        return median(forwards), median(backwards)

    def _round_s(self, work: "LayerPasses") -> tuple[float, float]:
        begin_s = self._now()
        roots = work.forward()
        middle_s = self._now()
        work.backward(roots)
        return middle_s - begin_s, self._now() - middle_s

    def _now(self) -> float:
        synchronize(self._device)
        return self._clock()


class LayerPasses:
    """One layer at work on one microbatch, by itself."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        skips: Mapping[str, Any],
        *,
        finish: Callable[[Any], Any],
    ) -> None:
        self._module = module
        self._inputs = (args, skips)
        self._keywords = keywords
        self._finish = finish
        self._own_skips = skip_names(module)
        self._skips = StageSkips([module])
        self._auxiliary: list[Auxiliary] = modules_with([module], Auxiliary)
        self._buffer = StageSkipBuffer({}, "")
        self.output: Any = None
        """The output of the last forward, without its graph."""
        self.held_skips: dict[str, Any] = {}
        """The skips that the layer put or got, by name, without their graph."""

    def forward(self) -> list[Tensor]:
        """Run the layer on leaves of its own, as a stage does; return where its backward begins."""
        args, skips = as_graph_leaves(self._inputs)
        self._buffer = StageSkipBuffer(skips, "")
        for module in self._auxiliary:
            module.begin()
        with self._skips.on(self._buffer):
            output = self._module(*args, **self._keywords)
        value = self._finish(output)
        skip_values = self._buffer.take(self._own_skips)
        _, added = take_all(self._auxiliary)
        self._buffer.close()
        self.output, self.held_skips = as_graph_leaves((output, skip_values))
        leaves, _ = flatten((value, skip_values, added))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def backward(
        self,
        roots: Sequence[Tensor],
        run: Callable[[Sequence[Tensor], Sequence[Tensor]], object] = torch.autograd.backward,
    ) -> None:
        """Run a backward, by default a whole one; layers that run again find the skips that they got."""
        gradients = [torch.ones_like(root) for root in roots]
        with self._skips.on(self._buffer):
            if roots:
                run(roots, gradients)
        for module in self._auxiliary:
            module.end()


@contextmanager
def _borrowed(layer: Layer, name: str, device: torch.device) -> Iterator[nn.Module]:
    """Bring a layer to the device; leave one that is there already as it was."""
    module = layer if isinstance(layer, nn.Module) else layer()
    if not isinstance(module, nn.Module):
        raise PartitionError(f"layer {name!r} builds a {type(module).__name__}; expected an nn.Module")
    if module is not layer:
        yield module.to(device)
        return
    home = next((tensor.device for tensor in module.parameters()), device)
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    with ExitStack() as stack:
        stack.callback(_give_back, module, buffers)
        stack.enter_context(without_gradients(list(module.parameters())))
        stack.callback(module.to, home)
        yield module.to(device)


@torch.no_grad()
def _give_back(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, values in buffers.items():
        module.get_buffer(name).copy_(values)


def _to(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
