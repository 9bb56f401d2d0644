"""Features that are values: parameters and buffers of the root, skips, second outputs, masks, modes of gradients."""

from contextlib import nullcontext

import torch
from torch import nn

from tests.random_cut_models.features import Feature
from tests.random_cut_models.models import WIDTH, WORDS


class At(Feature, is_base=True):
    """A feature that changes the hidden state before the blocks, behind one of them, or behind all."""

    where = ("begin", "between", "end")

    def __init__(self, draw, depth):
        super().__init__(draw, depth)
        self.at = draw.choice(self.where)

    def __str__(self):
        return f"{type(self).__name__}({self.kind or '-'}, {self.at} {self.place})"

    def begin(self, model, run):
        if self.at == "begin":
            self.apply(model, run)

    def after(self, model, run, place, block):
        if self.at == "between" and place == self.place:
            self.apply(model, run)

    def end(self, model, run):
        if self.at == "end":
            self.apply(model, run)


class RootParameter(At):
    kinds = ("multiplied", "added", "all")

    def build(self, model):
        model.tilt = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def apply(self, model, run):
        run.hidden = run.hidden + model.tilt if self.kind == "added" else run.hidden * (1 + model.tilt)

    def before(self, model, run, place, block):
        if self.kind == "all":
            run.hidden = run.hidden + model.tilt


class RootBuffer(At):
    kinds = ("saved", "unsaved")

    def build(self, model):
        model.register_buffer("table", torch.randn(WIDTH) * 0.3, persistent=self.kind == "saved")

    def apply(self, model, run):
        run.hidden = run.hidden + model.table


class RootModule(At):
    """A module of the root that is called between the blocks, or behind all of them."""

    kinds = ("linear", "norm", "batch norm")

    def build(self, model):
        made = {"linear": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "batch norm": nn.BatchNorm1d(WIDTH)}
        model.adapter = made[self.kind]

    def apply(self, model, run):
        if self.kind == "batch norm":
            run.hidden = run.hidden + model.adapter(run.hidden.flatten(0, 1)).view_as(run.hidden)
        else:
            run.hidden = run.hidden + model.adapter(run.hidden)


class Tie(Feature):
    kinds = ("blocks", "head", "root")

    def build(self, model):
        blocks = model.blocks
        if self.kind == "blocks":
            blocks[self.later].inner.weight = blocks[self.place].inner.weight
        elif self.kind == "root":
            model.shift = blocks[self.place].inner.bias
        else:
            model.words = nn.Linear(WIDTH, WORDS, bias=False)
            model.words.weight = model.embedding.weight

    def end(self, model, run):
        if self.kind == "head":
            run.hidden = run.hidden + model.words(run.hidden).mean(-1, keepdim=True)
        elif self.kind == "root":
            run.hidden = run.hidden + model.shift.sum()


class Frozen(Feature):
    kinds = ("begin", "block", "some", "head")

    def build(self, model):
        named = {"begin": [model.embedding], "block": [model.blocks[self.place]], "head": [model.head, model.norm]}
        for module in named.get(self.kind, [block.inner for block in list(model.blocks)[: self.place]]):
            module.requires_grad_(False)


class LongSkip(Feature):
    kinds = ("block", "begin", "sliced", "detached", "several")

    def begin(self, model, run):
        if self.kind == "begin":
            run.skip = run.hidden

    def before(self, model, run, place, block):
        if self.kind != "begin" and place == self.place:
            run.skip = run.hidden[:, :1] if self.kind == "sliced" else run.hidden
            run.skip = run.skip.detach() if self.kind == "detached" else run.skip

    def after(self, model, run, place, block):
        if place == self.later or (self.kind == "several" and place > self.place):
            run.hidden = run.hidden + 0.5 * run.skip


class ResidualAround(Feature):
    kinds = ("added", "gate", "mixed", "all")

    def before(self, model, run, place, block):
        run.residual = run.hidden

    def after(self, model, run, place, block):
        if place != self.place and self.kind != "all":
            return
        changed = {
            "gate": lambda: run.hidden * run.residual.sigmoid(),
            "mixed": lambda: torch.where(run.hidden > run.residual, run.hidden, run.residual * 0.5),
        }
        run.hidden = changed.get(self.kind, lambda: run.residual + run.hidden * 0.5)()


class Stack(Feature):
    """A U-Net: the first half's values are popped in the second half."""

    def begin(self, model, run):
        run.stack = []

    def before(self, model, run, place, block):
        if place < self.depth // 2:
            run.stack.append(run.hidden)
        elif run.stack:
            run.hidden = run.hidden + run.stack.pop() * 0.5


class SecondOutput(Feature):
    """Blocks return more than the hidden state; the second output goes to the next block, to all, or to the end."""

    kinds = ("next", "all", "end", "kept", "unused", "sum")
    packings = ("tuple", "list", "nested", "dict", "named", "dataclass")

    def __init__(self, draw, depth):
        super().__init__(draw, depth)
        self.packing = draw.choice(self.packings)

    def __str__(self):
        return f"SecondOutput({self.kind}, {self.packing}, {self.place})"

    def build(self, model):
        for block in model.blocks:
            block.returns = self.packing

    def begin(self, model, run):
        run.first_bias, run.total = None, 0

    def before(self, model, run, place, block):
        bias = {"next": run.second, "all": run.first_bias}.get(self.kind)
        if bias is not None:
            run.kwargs["bias"] = bias[0] if isinstance(bias, tuple) else bias

    def after(self, model, run, place, block):
        second = run.second[0] if isinstance(run.second, tuple) else run.second
        run.first_bias = second if place == 0 else run.first_bias
        if self.kind == "kept" and place == self.place:
            run.kept_second = second
        if self.kind == "sum" and second is not None:
            run.total = run.total + second.mean()

    def end(self, model, run):
        value = {"end": run.second, "kept": getattr(run, "kept_second", None), "sum": run.total}.get(self.kind)
        if value is not None:
            run.hidden = run.hidden * (1 + (value[0] if isinstance(value, tuple) else value))


class Single(Feature):
    """Blocks return a tuple of one."""

    def build(self, model):
        for block in model.blocks:
            block.returns = "single" if block.returns == "tensor" else block.returns


class HiddenMask(Feature):
    kinds = ("begin", "block", "own")

    def begin(self, model, run):
        run.notes["mask"] = (run.hidden.abs().sum(-1, keepdim=True) > 2).to(run.hidden.dtype)

    def before(self, model, run, place, block):
        if self.kind == "own" or (self.kind == "block" and place == self.place):
            run.notes["mask"] = (run.hidden.mean(-1, keepdim=True) > 0).to(run.hidden.dtype)
        run.kwargs["mask"] = run.notes["mask"]


class TokenMask(Feature):
    kinds = ("zero", "cumulative", "one hot", "equal")

    def before(self, model, run, place, block):
        ids = run.ids
        mask = {
            "zero": lambda: ids != 0,
            "cumulative": lambda: (ids == 1).cumsum(1) + 1,
            "one hot": lambda: nn.functional.one_hot(ids, WORDS).sum(-1) + ids.argmax(-1, keepdim=True),
            "equal": lambda: (ids[:, :, None] == ids[:, None]).sum(-1),
        }[self.kind]()
        run.kwargs["mask"] = mask.unsqueeze(-1).to(run.hidden.dtype)


class Positions(Feature):
    """A table of positions from shapes alone, for all blocks or added at one place."""

    kinds = ("blocks", "added", "float32")

    def begin(self, model, run):
        kind = torch.float32 if self.kind == "float32" else run.hidden.dtype
        run.positions = torch.arange(run.ids.shape[1], dtype=kind)[:, None].cos()

    def before(self, model, run, place, block):
        if self.kind != "added":
            run.kwargs["factor"] = run.positions
        elif place == self.place:
            run.hidden = run.hidden + run.positions


class InPlace(At):
    kinds = ("add", "assign", "mul", "slice", "out")

    def apply(self, model, run):
        hidden = run.hidden if self.kind != "out" else run.hidden.clone()
        if self.kind == "assign":
            hidden = hidden * 1
            hidden[:, 0] = 0
        elif self.kind == "slice":
            hidden = hidden + 0
            hidden[:, :1].mul_(0.5)
        elif self.kind == "add":
            hidden += 1
        else:
            hidden.mul_(0.7)
        run.hidden = hidden


class GradientMode(Feature):
    """Some blocks run without gradients, or under autocast."""

    kinds = ("no_grad", "autocast", "first")

    def around(self, model, run, place, block):
        if self.kind == "autocast":
            return torch.autocast("cpu", torch.bfloat16, enabled=place == self.place)
        if self.kind == "first":
            return torch.set_grad_enabled(torch.is_grad_enabled() and place > self.place)
        return torch.no_grad() if place == self.place else nullcontext()


class Detach(At):
    kinds = ("whole", "half")

    def apply(self, model, run):
        run.hidden = run.hidden.detach() if self.kind == "whole" else 0.5 * run.hidden + 0.5 * run.hidden.detach()


class TensorProperty(At):
    """The forward goes by what a tensor is, not by its values, there and behind all later blocks."""

    kinds = ("requires_grad", "is_leaf", "grad_fn", "stride", "contiguous", "dtype", "transposed")

    def before(self, model, run, place, block):
        if hasattr(run, "property_factor"):
            run.hidden = run.hidden * run.property_factor

    def apply(self, model, run):
        hidden = run.hidden
        if self.kind == "transposed":
            hidden = run.hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)
        answer = {
            "requires_grad": lambda: hidden.requires_grad,
            "is_leaf": lambda: hidden.is_leaf,
            "grad_fn": lambda: hidden.grad_fn is not None,
            "stride": lambda: hidden.stride(0) > hidden.stride(1),
            "contiguous": lambda: hidden.is_contiguous(),
            "dtype": lambda: hidden.dtype == torch.float64,
            "transposed": lambda: hidden.stride(0) > hidden.stride(1),
        }[self.kind]()
        run.property_factor = 1.25 if answer else 0.75
        run.hidden = run.hidden * run.property_factor


class OutputStructure(Feature):
    kinds = ("tuple", "dict", "hidden", "loss")

    def begin(self, model, run):
        run.extra = run.hidden

    def before(self, model, run, place, block):
        if place == self.place:
            run.extra = run.hidden

    def output(self, model, run, output):
        extra = {"hidden": run.extra, "loss": run.extra.square().mean(-1)}.get(self.kind, run.hidden)
        return {"output": output, "extra": extra} if self.kind == "dict" else (output, extra)
