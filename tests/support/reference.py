"""Plain gradient accumulation on one process: the judge that every schedule is compared with.

It splits, weights, hands skips and adds auxiliary losses by itself, in plain torch. Of Penstock it knows the types that
users pass in, so a mistake in the pipeline's own code cannot be on both sides of a comparison.
"""

import dataclasses
import inspect
import struct
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from penstock import LossOutput, PreSplit, Replicate, Split

AFTER_ALL_LAYERS = -1
"""The loss function draws random numbers as a layer of this number."""


@dataclasses.dataclass(frozen=True)
class ReferenceResult:
    """`loss` of the batch; `losses` and `outputs` per microbatch. No tensor keeps its graph. The rest is as in
    `StepResult`."""

    loss: Tensor
    losses: list[Tensor]
    outputs: list[Any]
    named_losses: dict[str, Tensor]
    reported: list[Any]
    total: Tensor


def reference_step(modules, args, kwargs, target, *, seed=None, step_number=0, **options):
    """Run forward, loss and backward of one microbatch after another; gradients are added to `.grad`.

    With a `seed`, layers draw what they draw in the step of this number of a pipeline with this seed. The options are
    those of `_Batch` and `loss`.
    """
    return _run(modules, args, kwargs, target, random=None if seed is None else (seed, step_number), **options)


@torch.no_grad()
def reference_evaluate(modules, args, kwargs, target, **options):
    """Run forward and loss only; modules stay in the mode (train or eval) in which they are."""
    return _run(modules, args, kwargs, target, random=None, **options)


def _run(modules, args, kwargs, target, *, loss, random, **options):
    batch = _Batch((tuple(args), dict(kwargs), target), **options)
    model = _Model(list(modules))
    found = []
    for index in range(batch.num_microbatches):
        args, kwargs, target = batch.parts[index]
        with _restored_generators(modules) if random else nullcontext():
            forward = model.forward(args, kwargs, None if random is None else (*random, index))
            known = {"weight": batch.weights[index]} if _wants_weight(loss) else {}
            if random:
                _set_generators(modules, generator_seed(*random, AFTER_ALL_LAYERS, index))
            forward.read_loss(loss(forward.output, target, **known))
        terms = [forward.loss * batch.weights[index]] if batch.weights[index] else []
        if forward.added is not None and forward.added.requires_grad and batch.row_weights[index]:
            terms.append(forward.added * batch.row_weights[index])
        if terms and torch.is_grad_enabled():
            with model.connected(forward.skips):  # layers may compute their forward again
                sum(terms[1:], start=terms[0]).backward()
        found.append(forward.without_graph())
    model.end()
    return _result(found, batch)


# ---- the batch


class _Batch:
    """The microbatches of a batch and their weights in its loss."""

    def __init__(self, whole, num_microbatches, specs=None, allow_ragged=False, reduction="mean", count=None):
        marks = (None, None, None) if specs is None else (specs.args, specs.kwargs, specs.target)
        self.num_microbatches = num_microbatches
        sizes = _sizes(whole, marks, num_microbatches)
        assert allow_ragged or len(set(sizes)) == 1 or _pre_split(whole)
        self.parts = [_part(whole, marks, index, sizes) for index in range(num_microbatches)]
        self.row_weights = weights(sizes if any(sizes) else [1] * num_microbatches, reduction)
        self.weights = self.row_weights
        if count is not None:
            self.weights = weights([count(target) for *_, target in self.parts], reduction)


def weights(shares, reduction="mean"):
    """Return each part's factor in a loss, which is a mean over all shares, or a sum."""
    if reduction == "sum":
        return [1.0] * len(shares)
    total = float(sum(float(share) for share in shares))
    return [float(share) / total if total else 0.0 for share in shares]


def even_sizes(length, num_parts):
    """Return how long each part of a length is; the first ones take what is left over."""
    return [length // num_parts + (index < length % num_parts) for index in range(num_parts)]


def rows_of(value, dim, index, sizes):
    """Return one of the parts into which these sizes cut a tensor."""
    return value.narrow(dim, sum(sizes[:index]), sizes[index])


def _part(value, mark, index, sizes):
    if isinstance(value, PreSplit):
        return value.parts[index]
    if (children := _children(value)) is not None:
        return _rebuilt(value, [_part(x, _mark_of(mark, at), index, sizes) for at, x in children])
    dim = _dim(value, mark)
    return value if dim is None else rows_of(value, dim, index, sizes)


def _sizes(whole, marks, num_parts):
    lengths = [value.shape[dim] for value, mark in _leaves(whole, marks) if (dim := _dim(value, mark)) is not None]
    given = [sizes for value in _pre_split(whole) if (sizes := [_rows(part) for part in value.parts])[0]]
    if given:
        return given[0]
    return even_sizes(lengths[0], num_parts) if lengths else [0] * num_parts


def _rows(tree):
    return next((value.shape[0] for value, _ in _leaves(tree) if isinstance(value, Tensor) and value.dim()), 0)


def _pre_split(whole):
    return [value for value, _ in _leaves(whole) if isinstance(value, PreSplit)]


def _dim(value, mark):
    """The dimension along which a value is cut; None where every microbatch gets all of it."""
    if not isinstance(value, Tensor) or isinstance(mark, Replicate):
        return None
    if isinstance(mark, Split):
        return mark.dim
    return 0 if value.dim() else None


def _leaves(value, mark=None):
    children = _children(value)
    if children is None:
        return [(value, mark)]
    return [leaf for at, child in children for leaf in _leaves(child, _mark_of(mark, at))]


def _children(value):
    """The children of a tree by key, field or position; None for a leaf."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (Split, Replicate)):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuilt(value, children):
    if isinstance(value, dict):
        return type(value)(zip(value, children, strict=True))
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return type(value)(*children)
    return type(value)(children)


def _mark_of(mark, at):
    if isinstance(mark, dict):
        return mark.get(at)
    return mark[at] if isinstance(mark, (tuple, list)) else mark


# ---- the layers


class _Model:
    """The layers of a whole model."""

    def __init__(self, layers):
        self._layers = layers
        inner = dict.fromkeys(module for layer in layers for module in layer.modules())
        self._skips = [module for module in inner if hasattr(module, "begin_skips")]
        self._adding = [module for module in inner if all(hasattr(module, name) for name in ("begin", "take", "end"))]

    def forward(self, args, kwargs, random):
        """Run the layers; `random` is seed, step and microbatch."""
        skips = _Values()
        for module in self._adding:
            module.begin()
        with self.connected(skips):
            for number, layer in enumerate(self._layers):
                if random is not None:
                    seed, step, microbatch = random
                    _set_generators(self._layers, generator_seed(seed, step, number, microbatch))
                args = (layer(*args, **_keywords(layer, len(args), kwargs)),)
        forward = _Forward(args[0], skips)
        for module in self._adding:
            forward.add(module, module.take())
        return forward

    @contextmanager
    def connected(self, values):
        """Let layers put into these values, and get from them."""
        for module in self._skips:
            module.begin_skips(values)
        yield
        for module in self._skips:
            module.end_skips()

    def end(self):
        """Leave the layers as they were."""
        for module in self._adding:
            module.end()


class _Values(dict):
    """What skips carry; a forward that runs again puts what is there already."""

    def put(self, name, value):
        self.setdefault(name, value)

    def get(self, name):
        return self[name]


class _Forward:
    """What one microbatch came to."""

    def __init__(self, output, skips):
        self.output, self.skips = output, skips
        self.loss, self.named, self.reported = None, {}, None
        self.added, self.added_values = None, {}

    def add(self, module, value):
        """Add what a layer added to be trained; the values of one name and type are added up in float64."""
        if value is None:
            return
        key, exact = (module.name, value.dtype), value.detach().double()
        self.added_values[key] = self.added_values[key] + exact if key in self.added_values else exact
        weighted = value * module.weight
        self.added = weighted if self.added is None else self.added + weighted

    def read_loss(self, value):
        """Read any form of a loss: a tensor, named ones, a sum and what it is over, a `LossOutput`."""
        over = None
        if isinstance(value, tuple):
            value, over = value
        elif isinstance(value, LossOutput):
            value, over, self.reported = value.loss, value.weight, value.reported

        def mean(total):
            total = total.reshape(())
            if over is None:
                return total
            return total / float(over) if over else torch.zeros_like(total)

        if not isinstance(value, Mapping):
            self.loss = mean(value)
            return
        means = {name: mean(total) for name, total in value.items()}
        first, *others = means.values()
        self.loss = sum(others, start=first)
        self.named = {name: loss.detach() for name, loss in means.items()}

    def without_graph(self):
        """Keep the numbers alone."""
        self.output, self.reported = _detached(self.output), _detached(self.reported)
        self.loss, self.skips = self.loss.detach(), None
        self.added = None if self.added is None else self.added.detach()
        return self


def _keywords(layer, num_args, kwargs):
    """The keywords of a batch that a layer's forward names, or what it wraps, if they are not given by position."""
    if not kwargs:
        return {}
    parameters = list(inspect.signature(layer.forward).parameters.values())
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    filled = [p.name for p in parameters[:num_args] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {name: value for name, value in kwargs.items() if name in named and name not in filled}
    children = list(layer.children())
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and len(children) == 1:
        taken |= {name: kwargs[name] for name in _keywords(children[0], num_args, kwargs) if name not in filled}
    return taken


def _detached(value):
    children = _children(value)
    if children is not None:
        return _rebuilt(value, [_detached(child) for _, child in children])
    return value.detach() if isinstance(value, Tensor) else value


# ---- the losses of a batch


def combined(losses, factors):
    """Return the sum of loss * factor; a factor of 0 adds nothing, even where the loss is not a number."""
    total = torch.zeros_like(losses[0])
    for loss, factor in zip(losses, factors, strict=True):
        total = total + loss.detach() * factor if factor else total
    return total


def _result(found, batch):
    losses = [each.loss for each in found]
    loss = combined(losses, batch.weights)
    named = _combined_by_key([each.named for each in found], batch.weights)
    added = [{key: value.to(key[1]) for key, value in each.added_values.items()} for each in found]
    for (name, _), value in _combined_by_key(added, batch.row_weights).items():
        named[name] = named[name] + value if name in named else value
    trained = [{} if each.added is None else {"all": each.added} for each in found]
    totals = _combined_by_key(trained, batch.row_weights).values()
    reported = [each.reported for each in found]
    return ReferenceResult(
        loss,
        losses,
        [each.output for each in found],
        named,
        [] if all(value is None for value in reported) else reported,
        sum(totals, start=loss),
    )


def _combined_by_key(values, factors):
    """Combine the values of each key over the microbatches that have it."""
    keys = dict.fromkeys(key for each in values for key in each)
    pairs = {key: [(v[key], f) for v, f in zip(values, factors, strict=True) if key in v] for key in keys}
    return {key: combined(*zip(*each, strict=True)) for key, each in pairs.items()}


def _wants_weight(loss):
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except ValueError:  # built into torch
        return False
    return "weight" in parameters and parameters["weight"].kind is inspect.Parameter.KEYWORD_ONLY


# ---- random numbers


def generator_seed(seed, step, layer, microbatch, slice=0):
    """Return where the generators stand when a layer's forward begins."""
    digest = blake2b(struct.pack("<5q", seed, step, layer, microbatch, slice), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _generators(modules):
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    queued = [device for device in devices if device.type != "cpu"]
    return [torch.default_generator, *(torch.get_device_module(each).default_generators[each.index] for each in queued)]


def _set_generators(modules, start):
    for generator in _generators(modules):
        generator.manual_seed(start)


@contextmanager
def _restored_generators(modules):
    generators = _generators(modules)
    states = [generator.get_state() for generator in generators]
    yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
