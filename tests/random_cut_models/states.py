"""Features that are state around the blocks, changes by the model's owner, and draws."""

import random

import torch
from torch import nn
from torch.nn import functional as F

from tests.random_cut_models.features import Feature
from tests.random_cut_models.models import WIDTH
from tests.random_cut_models.values import At
from tests.support.draws import drawn


class State(Feature):
    """State of the root that each forward changes."""

    weight = 0.3
    has_state = True
    kinds = ("number", "buffer", "saved", "in place", "previous", "list", "ema", "noted", "deep", "tensor")

    def build(self, model):
        if self.kind in ("buffer", "saved", "in place"):
            model.register_buffer("calls", torch.zeros(()), persistent=self.kind == "saved")
        else:
            model.calls = {"list": [], "noted": [], "deep": {"count": [0]}, "previous": None}.get(self.kind, 0)

    def begin(self, model, run):
        kind = self.kind
        if kind in ("list", "noted"):
            model.calls.append(run.ids.shape[1])
        elif kind == "in place":
            model.calls.add_(1)
        elif kind == "deep":
            model.calls["count"][0] += 1
        elif kind == "previous":
            before, model.calls = model.calls, run.hidden.detach().mean()
            run.factor = 1 if before is None else 1 + before
            return
        elif kind == "ema":
            model.calls = 0.9 * model.calls + 0.1 * run.ids.shape[1]
        elif kind == "tensor":
            model.calls = model.calls + run.ids.sum() / 10
        else:
            model.calls = model.calls + 1
        number = {"list": lambda: len(model.calls), "noted": lambda: 0, "deep": lambda: model.calls["count"][0]}
        run.factor = 1 + number.get(kind, lambda: model.calls)() / 10

    def after(self, model, run, place, block):
        run.hidden = run.hidden * run.factor


class StateBehind(Feature):
    """State that a forward changes between the blocks, or behind them."""

    weight = 0.3
    has_state = True
    kinds = ("saved ema", "previous", "number", "history")

    def build(self, model):
        if self.kind == "saved ema":
            model.register_buffer("ema", torch.zeros(WIDTH))
        model.memo = {"previous": None, "history": []}.get(self.kind, 0)

    def after(self, model, run, place, block):
        if place != self.place:
            return
        if self.kind == "saved ema":
            model.ema.mul_(0.9).add_(run.hidden.detach().mean((0, 1)), alpha=0.1)
            run.hidden = run.hidden - model.ema
        elif self.kind == "previous":
            run.hidden = run.hidden if model.memo is None else run.hidden + model.memo
            model.memo = run.hidden.detach().mean((0, 1))
        elif self.kind == "number":
            model.memo += 1
            run.hidden = run.hidden * (1 + model.memo / 10)
        else:
            model.memo.append(run.hidden.detach().mean())


class Harmless(Feature):
    """An attribute that each forward makes anew from shapes alone: right, whoever makes it."""

    kinds = ("buffer", "attribute", "memo", "same", "table")

    def build(self, model):
        if self.kind in ("buffer", "table"):
            model.register_buffer("cache", torch.zeros(1), persistent=False)
        else:
            model.cache = {} if self.kind == "memo" else None

    def begin(self, model, run):
        length = run.ids.shape[1]
        if self.kind == "memo":
            run.cached = model.cache.setdefault(length, torch.arange(length)[:, None] / 5)
        elif self.kind == "table" and model.cache.shape[0] >= length:
            run.cached = model.cache[:length]
        else:
            run.cached = model.cache = torch.arange(length)[:, None] / 5

    def after(self, model, run, place, block):
        run.hidden = run.hidden + run.cached


class BlockState(Feature):
    """State of a block itself, which its own forward changes."""

    has_state = True
    kinds = ("saved", "unsaved", "number")

    def build(self, model):
        for block in model.blocks:
            if self.kind == "number":
                block.seen = 0
            else:
                block.register_buffer("seen", torch.zeros(()), persistent=self.kind == "saved")
            block.register_forward_pre_hook(Counted())


class Counted:
    """A hook that counts the calls of a block."""

    def __call__(self, module, args):
        module.seen = module.seen + 1
        return (args[0] * (1 + module.seen / 10), *args[1:])


class Changed(Feature):
    """The owner changes the model between calls."""

    kinds = ("number", "buffer", "dropout", "hook", "config", "block number", "block buffer", "module")

    def build(self, model):
        model.strength, model.gate = 0.5, nn.Dropout(0.0)
        model.config = Config()
        model.register_buffer("ramp", torch.ones(WIDTH), persistent=False)
        for block in model.blocks:
            block.register_buffer("ramp", torch.ones(()), persistent=False)
            block.register_forward_pre_hook(Ramp())

    def change(self, model, number):
        if number == 0:
            return
        if self.kind == "number":
            model.strength = number / 2
        elif self.kind == "buffer":
            model.ramp.mul_(1 + number)
        elif self.kind == "dropout":
            model.gate.p = float(number % 2)
        elif self.kind == "hook":
            model.gate.register_forward_pre_hook(Ramped())
        elif self.kind == "config":
            model.config.factor = number / 3
        elif self.kind == "block number":
            model.blocks[self.place].gain = 1 + number
        elif self.kind == "block buffer":
            model.blocks[self.place].ramp.mul_(2)
        elif self.kind == "module":
            model.gate.training = number % 2 == 0

    def after(self, model, run, place, block):
        run.hidden = run.hidden + model.gate(run.hidden) * model.strength * model.ramp * model.config.factor


class Config:
    """The settings of a model, as those of transformers."""

    def __init__(self):
        self.factor = 1.0


class Ramp:
    def __call__(self, module, args):
        return (args[0] * module.ramp, *args[1:])


class Ramped:
    def __call__(self, module, args):
        return (args[0] * 1.5,)


# ---- draws


def dropped(site, hidden, training, p=0.5):
    """Drop out, by the mask of the pipeline where the unsplit model repeats its draws."""
    if not training:
        return F.dropout(hidden, p, training)
    mask = drawn(site, hidden, lambda: F.dropout(torch.ones_like(hidden), p))
    return hidden * mask


class Dropout(Feature):
    """A dropout between the blocks: a function, a module of the root, or one that drops all or nothing."""

    kinds = ("function", "edge", "module edge", "one")

    def build(self, model):
        model.drop = nn.Dropout(0.0)

    def after(self, model, run, place, block):
        if self.kind == "edge":
            run.hidden = run.hidden + F.dropout(run.hidden, float(place % 2), model.training)
        elif self.kind == "module edge":
            run.hidden = model.drop(run.hidden)
        elif self.kind == "function" or place == self.place:
            run.hidden = run.hidden + dropped(f"drop {place}", run.hidden, model.training)


class SharedMask(Feature):
    """One random mask for all blocks."""

    kinds = ("rand", "bernoulli", "rows", "dropout", "integers", "like")

    def begin(self, model, run):
        rows, length = run.ids.shape
        shape = (rows, 1, 1) if self.kind == "rows" else (rows, length, 1)
        draw = {
            "bernoulli": lambda: torch.bernoulli(torch.full(shape, 0.5)),
            "dropout": lambda: F.dropout(torch.ones(shape), 0.5, training=True),
            "integers": lambda: torch.randint(1, 4, shape),
            "like": lambda: torch.rand_like(run.hidden),
        }.get(self.kind, lambda: torch.rand(shape))
        run.keep = drawn("mask", run.ids, draw) if model.training else torch.ones(shape)

    def before(self, model, run, place, block):
        run.kwargs["mask"] = run.keep


class Noise(At):
    """Random values added at one place."""

    kinds = ("randn", "like", "uniform", "permutation")

    def apply(self, model, run):
        if not model.training:
            return
        length = run.ids.shape[1]
        draw = {
            "like": lambda: torch.randn_like(run.hidden),
            "uniform": lambda: torch.empty(length, 1, dtype=run.hidden.dtype).uniform_(),
            "permutation": lambda: torch.randperm(length)[:, None],
        }.get(self.kind, lambda: torch.randn(length, 1))
        run.hidden = run.hidden + drawn("noise", run.ids, draw)


class PythonRandom(Feature):
    """A draw of Python's own generator."""

    weight = 0.3
    kinds = ("number", "branch", "order")

    def begin(self, model, run):
        run.luck = drawn("luck", run.ids, lambda: random.random()) if model.training else 0.5

    def after(self, model, run, place, block):
        if self.kind == "branch":
            run.hidden = run.hidden * 0.5 if run.luck < 0.5 else run.hidden
        else:
            run.hidden = run.hidden * run.luck


class BlockDropout(Feature):
    """Draws inside the blocks."""

    def build(self, model):
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(Dropping(index))


class Dropping:
    def __init__(self, index):
        self.index = index

    def __call__(self, module, args):
        return (dropped(f"inside {self.index}", args[0], module.training), *args[1:])


class RandomLayerDrop(Feature):
    """A block is left out at random, as layer drop of transformers does it."""

    weight = 0.3
    kinds = ("torch", "python")

    def before(self, model, run, place, block):
        if place == self.place and model.training:
            draw = (lambda: torch.rand([])) if self.kind == "torch" else random.random
            if drawn(f"layer drop {place}", run.ids, draw) < 0.5:
                run.call = lambda hidden, **kwargs: hidden
