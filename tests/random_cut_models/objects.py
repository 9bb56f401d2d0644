"""Features that are objects: attributes, hooks, submodules, containers that blocks fill, and the order of calls."""

import torch
from torch import nn

from tests.random_cut_models.features import Feature
from tests.random_cut_models.models import WIDTH


class SetAttribute(Feature):
    """The forward sets an attribute on a block before its call."""

    kinds = ("number", "place", "batch", "hidden", "begin", "parameter", "deleted", "after")

    def build(self, model):
        if self.kind == "parameter":
            model.pitch = nn.Parameter(torch.rand(()))

    def begin(self, model, run):
        run.first = run.hidden.mean().sigmoid()

    def before(self, model, run, place, block):
        block.gain = {
            "number": lambda: 0.5 + run.ids.shape[1],
            "batch": lambda: run.ids.unsqueeze(-1).to(run.hidden.dtype) / 5,
            "hidden": lambda: run.hidden.mean(),
            "begin": lambda: run.first,
            "parameter": lambda: model.pitch,
        }.get(self.kind, lambda: 0.5 * (place + 1))()

    def after(self, model, run, place, block):
        if self.kind == "after":
            run.hidden = run.hidden * block.gain
        if self.kind == "deleted":
            del block.gain

    def end(self, model, run):
        for block in model.blocks:
            if hasattr(block, "gain"):
                del block.gain
            block.gain = 1.0


class ReadAttribute(Feature):
    """The forward reads an attribute of a block, or of a module behind the blocks."""

    kinds = (
        "training",
        "number",
        "parameter",
        "shape",
        "length",
        "weight of head",
        "requires_grad",
        "parameters",
        "type",
    )

    def build(self, model):
        for index, block in enumerate(model.blocks):
            block.depth_scale = 0.8 + index / 10

    def after(self, model, run, place, block):
        run.hidden = (
            run.hidden
            * {
                "training": lambda: 0.5 if block.training else 1.0,
                "number": lambda: block.depth_scale,
                "parameter": lambda: 1 + block.inner.bias.mean(),
                "shape": lambda: block.inner.out_features / 3,
                "length": lambda: 2 / len(model.blocks),
                "weight of head": lambda: 1 + model.head.weight.mean() if place == self.place else 1,
                "requires_grad": lambda: 0.5 if block.inner.weight.requires_grad else 1.0,
                "parameters": lambda: sum(p.numel() for p in block.parameters()) / 30,
                "type": lambda: 0.9 if isinstance(block, type(model.blocks[0])) else 0.1,
            }[self.kind]()
        )


class ForwardCall(Feature):
    """`block.forward(h)`, which runs no hooks, on blocks that have some."""

    kinds = ("hooked", "plain", "one")

    def build(self, model):
        if self.kind != "plain":
            for block in model.blocks:
                block.register_forward_hook(Doubled())

    def before(self, model, run, place, block):
        if self.kind != "one" or place == self.place:
            run.call = block.forward


class Doubled:
    """A hook, which copies of a model take along."""

    def __call__(self, module, args, output):
        return output * 1.25 if isinstance(output, torch.Tensor) else None


class Shifted:
    def __call__(self, module, args):
        return (args[0] + 0.25, *args[1:])


class Hook(Feature):
    kinds = ("block", "before", "norm", "root", "all")

    def build(self, model):
        if self.kind == "before":
            model.blocks[self.place].register_forward_pre_hook(Shifted())
        elif self.kind == "root":
            model.register_forward_hook(Doubled())
        else:
            modules = {"block": [model.blocks[self.place]], "norm": [model.norm]}.get(self.kind, list(model.blocks))
            for module in modules:
                module.register_forward_hook(Doubled())


class InnerCall(Feature):
    """The forward calls a submodule of a block."""

    kinds = ("again", "alone", "other", "norm")

    def build(self, model):
        for block in model.blocks:
            block.before_norm = nn.LayerNorm(WIDTH)

    def before(self, model, run, place, block):
        if self.kind == "norm":
            run.hidden = block.before_norm(run.hidden)
        elif place == self.place:
            if self.kind == "again":
                run.hidden = run.hidden + block.inner(run.hidden)
            elif self.kind == "alone":
                run.call = lambda hidden, **kwargs: block.inner(hidden).tanh()
            else:
                run.hidden = model.blocks[self.later].inner(run.hidden)


class NormAgain(Feature):
    """The norm behind the blocks is called between them too."""

    def before(self, model, run, place, block):
        if place == self.place:
            run.hidden = model.norm(run.hidden)


class Order(Feature):
    weight = 0.3
    kinds = ("reversed", "twice", "left out", "loop", "swapped")

    def order(self, order):
        if self.kind == "reversed":
            return order[::-1]
        if self.kind == "twice":
            return [*order[: self.place + 1], *order[self.place :]]
        if self.kind == "left out":
            return order[: self.place] + order[self.place + 1 :]
        return order * 2 if self.kind == "loop" else [*order[1:], order[0]]


class LayerDrop(Feature):
    """A block is left out in some batches: by a flag, or by the length."""

    weight = 0.3
    has_options = True
    kinds = ("flag", "length", "training")

    def batch(self, draw, rows, length):
        return {"flag": True} if self.kind == "flag" else {}

    def before(self, model, run, place, block):
        is_dropped = {"flag": run.flag, "length": run.ids.shape[1] > 3, "training": model.training}[self.kind]
        if is_dropped and place == self.place:
            run.call = lambda hidden, **kwargs: hidden


# ---- containers, which blocks fill


class Bag:
    """An object with attributes."""

    def __init__(self):
        self.number, self.last = 0, None


def count(sink, change):
    sink["number"] = sink.get("number", 0) + 1
    return sink["number"] / 3


def put_loss(sink, change):
    sink.append(change.square().mean())
    return 1


def put_mean(sink, change):
    sink.append(change.detach().mean())
    return 1 + sum(sink)


def set_attributes(sink, change):
    sink.number += 1
    return sink.number / 2


def keep_last(sink, change):
    last, sink.last = sink.last, change.mean()
    return 1 if last is None else 1 + last


def share(sink, change):
    return 1 + sink.setdefault("key", change.mean(1, keepdim=True))


def add_to_set(sink, change):
    sink.add(len(sink))
    return len(sink) / 2


def read_only(sink, change):
    return sink["factor"]


def add_tensor(sink, change):
    sink.add_(change.detach().mean())
    return 1


SINKS = {
    "count": (dict, count),
    "losses": (list, put_loss),
    "means": (list, put_mean),
    "attributes": (Bag, set_attributes),
    "last": (Bag, keep_last),
    "share": (dict, share),
    "set": (set, add_to_set),
    "read": (lambda: {"factor": 0.7}, read_only),
    "tensor": (lambda: torch.zeros((), dtype=torch.float64), add_tensor),
}


class Container(Feature):
    """Blocks get an object of the forward, which they fill."""

    weight = 0.6
    kinds = tuple(SINKS)

    def build(self, model):
        for block in model.blocks:
            block.fills = SINKS[self.kind][1]

    def begin(self, model, run):
        run.sink = SINKS[self.kind][0]()

    def before(self, model, run, place, block):
        run.kwargs["sink"] = run.sink

    def end(self, model, run):
        total = {
            "losses": lambda: sum(run.sink),
            "count": lambda: run.sink["number"],
            "tensor": lambda: run.sink,
        }.get(self.kind, lambda: 1)()
        run.hidden = run.hidden * (1 + total)


class Notebook(Feature):
    """Blocks note something on themselves, which the forward reads behind them."""

    weight = 0.3
    has_state = True
    kinds = ("number", "tensor", "loss", "own")

    def begin(self, model, run):
        if self.kind in ("loss", "own"):  # a block that is left out would keep the last forward's graph
            for block in model.blocks:
                block.noted = 0.0

    def build(self, model):
        for block in model.blocks:
            block.noted = 0.0
            block.register_forward_hook(Noting(self.kind))

    def end(self, model, run):
        if self.kind != "own":
            run.hidden = run.hidden * (1 + sum(block.noted for block in model.blocks))


class Noting:
    def __init__(self, kind):
        self.kind = kind

    def __call__(self, module, args, output):
        hidden = output if isinstance(output, torch.Tensor) else args[0]
        kinds = {"number": lambda: module.noted + 1, "tensor": lambda: hidden.detach().mean()}
        module.noted = kinds.get(self.kind, lambda: hidden.mean())()
